"""T-MASS: its results under both protocols."""

import pytest
import torch
from methods.parts import build, features
from torch.utils.data import DataLoader

from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.methods import TMASS
from tvr_lightning.testing.processes import quiet_trainer

N = 5


class Batches(list):
    """Dataset of batches for Lightning's Trainer."""

    ground_truth = GroundTruth(torch.arange(N), N, "features", "test", "one caption per video")


@pytest.mark.parametrize("protocol", ["query", "as-released"])
@pytest.mark.filterwarnings("ignore:.*ground truth leaks into the ranking")
def test_results_of_the_released_protocol_are_marked_as_leaking(protocol):
    text, video = features(N, N)
    made, released = build(TMASS, {}, torch.float32).eval(), protocol == "as-released"
    made.protocol = protocol
    index = torch.arange(N)
    batches = [TextBatch(text, index)], [VideoBatch(video, index, [f"video{j}" for j in range(N)])]
    loaders = [DataLoader(Batches(of_a_side), batch_size=None) for of_a_side in batches]
    quiet_trainer().test(made, loaders, verbose=False)
    assert (LEAKS in made.evaluation.warnings) is released
    assert ("as released" in made.evaluation.protocol) is released
    made.eval()
    scores = (made.score_as_released(text, video, text) if released else made.score(text, video)).similarity
    expected = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    assert made.evaluation.text_to_video["MnR"] == pytest.approx(expected.float().mean().item())
