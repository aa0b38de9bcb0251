"""T-MASS: its results under both protocols."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from methods.parts import build, features
from torch.utils.data import DataLoader

from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.methods import TMASS
from tvr_lightning.testing.processes import quiet_trainer

N = 5


def model(protocol="query", **options):
    made = build(TMASS, options, torch.float32).eval()
    made.protocol = protocol
    return made


class Stored(LightningDataModule):
    """Features as test data, in two batches of texts and two of videos."""

    def __init__(self, text, video):
        super().__init__()
        self.text, self.video = text, video

    def test_dataloader(self):
        halves = [slice(0, 3), slice(3, N)]
        texts = [TextBatch(self.text[h], torch.arange(N)[h]) for h in halves]
        videos = [VideoBatch(self.video[h], torch.arange(N)[h], [f"video{j}" for j in range(N)[h]]) for h in halves]
        return [DataLoader(batches, batch_size=None) for batches in (texts, videos)]

    def ground_truth(self, name):
        return GroundTruth(torch.arange(N), N, "features", name, "one caption per video")


@pytest.mark.parametrize("protocol", ["query", "as-released"])
@pytest.mark.filterwarnings("ignore:.*ground truth leaks into the ranking")
def test_results_of_the_released_protocol_are_marked_as_leaking(protocol):
    text, video = features(N, N)
    made, released = model(protocol=protocol), protocol == "as-released"
    quiet_trainer().test(made, datamodule=Stored(text, video), verbose=False)
    assert (LEAKS in made.evaluation.warnings) is released
    assert ("as released" in made.evaluation.protocol) is released
    made.eval()
    scores = (made.score_as_released(text, video, text) if released else made.score(text, video)).similarity
    expected = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    assert made.evaluation.text_to_video["MnR"] == pytest.approx(expected.float().mean().item())
