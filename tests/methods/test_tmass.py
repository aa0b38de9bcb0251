"""T-MASS against the authors' code under both protocols, and what its paper says of the stochastic text."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from methods.parts import FORMS, build, moved, paired
from methods.parts import features as all_features
from torch.utils.data import DataLoader

from tvr_lightning.audit.experiments import audit_scores
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.layers.stochastic import Normal, Uniform
from tvr_lightning.methods import TMASS
from tvr_lightning.methods.tmass import TMASSHead, TMASSOptions, score_as_released
from tvr_lightning.methods.xpool import XPoolHead, XPoolOptions

N, M, F, D = 5, 5, 4, 64


def features(items=N):
    text, video = all_features(items, items)
    video.frame_mask[3] = True  # with one frame, there is nothing to pool for a text
    return text, video


def head(form=None, **options):
    torch.manual_seed(0)
    made = moved(TMASSHead(D, F, TMASSOptions(XPoolOptions(dropout=0.0), **options)), 0.1)
    made.required_form = FORMS.get(form)
    return made.eval()


def model(protocol="query", **options):
    made = build(TMASS, options, torch.float32).eval()
    made.protocol = protocol
    return made


def test_both_forms_give_the_same_scores_as_released():
    (text, video), draws = features(), Uniform().draw((4, D))
    found = [score_as_released(head(form), text, video, text, draws).similarity for form in FORMS]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_score_is_the_best_of_its_trials():
    (text, video), draws = features(), Uniform().draw((6, D))
    made = head()
    each = torch.stack([made(text, video, draw[None]).similarity for draw in draws])
    torch.testing.assert_close(made(text, video, draws).similarity, each.amax(0))
    assert (made(text, video, draws).similarity >= made(text, video, draws[:2]).similarity - 1e-6).all()


def test_a_text_without_extent_is_x_pools():
    (text, video), draws = features(), Uniform().draw((4, D))
    made = head()
    made.radius.linear_proj.weight.data.zero_()
    made.radius.linear_proj.bias.data.fill_(-40.0)
    plain = XPoolHead(D, F, XPoolOptions(dropout=0.0)).eval()
    plain.attention = made.attention
    expected = plain(text, video).similarity
    torch.testing.assert_close(made(text, video, draws).similarity, expected, rtol=1e-5, atol=1e-6)


def test_the_released_protocol_differs_wherever_a_caption_is_not_the_query():
    text, video = features()
    made = model(protocol="as-released").eval()
    clean, leaking = made.score(text, video).similarity, made.score_as_released(text, video, text).similarity
    own = torch.eye(N, dtype=torch.bool)
    torch.testing.assert_close(leaking[own], clean[own], rtol=1e-5, atol=1e-6)
    assert ((leaking - clean).abs()[~own] > 1e-4).all()


def test_the_audit_passes_the_query_protocol_and_catches_the_released_one():
    text, video = features(8)
    made = model(attention=XPoolOptions(dropout=0.0)).eval()
    assert not audit_scores(text, video, torch.arange(8), score=made.score).leaks
    assert audit_scores(text, video, torch.arange(8), score_as_released=made.score_as_released).leaks


class Stored(LightningDataModule):
    """Features in place of media, two batches of each kind."""

    def __init__(self, text, video):
        super().__init__()
        self.text, self.video = text, video

    def test_dataloader(self):
        halves = [slice(0, 3), slice(3, N)]
        texts = [TextBatch(self.text[h], torch.arange(N)[h]) for h in halves]
        videos = [VideoBatch(self.video[h], torch.arange(M)[h], [f"video{j}" for j in range(M)[h]]) for h in halves]
        return [DataLoader(batches, batch_size=None) for batches in (texts, videos)]

    def ground_truth(self, name):
        return GroundTruth(torch.arange(N), M, "features", name, "one caption per video")


@pytest.mark.parametrize("protocol", ["query", "as-released"])
def test_results_of_the_released_protocol_say_that_ground_truth_leaks(protocol, tmp_path):
    text, video = features()
    made = model(protocol=protocol)
    quiet = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    if protocol == "query":
        trainer.test(made, datamodule=Stored(text, video), verbose=False)
        assert LEAKS not in made.evaluation.warnings
        assert "as released" not in made.evaluation.protocol
    else:
        with pytest.warns(UserWarning, match="ground truth leaks into the ranking"):
            trainer.test(made, datamodule=Stored(text, video), verbose=False)
        assert LEAKS in made.evaluation.warnings
        assert "as released" in made.evaluation.protocol
    made.eval()
    similarity = made.score_as_released(text, video, text) if protocol == "as-released" else made.score(text, video)
    expected = 1 + (similarity.similarity > similarity.similarity.diagonal()[:, None]).sum(1)
    assert made.evaluation.text_to_video["MnR"] == pytest.approx(expected.float().mean().item())


def test_every_option_changes_the_scores():
    variants = [
        {},
        {"prior": Normal()},
        {"prior": Normal(0.1)},
        {"trials": 3},
        {"trials": "mean"},
        {"radius": "scalar"},
    ]
    variants.append({"attention": XPoolOptions(heads=4)})
    scores = [model(**options).score(*features()).similarity for options in variants]
    for i, one in enumerate(scores):
        for other in scores[:i]:
            assert not torch.allclose(one, other, atol=1e-5)


def test_the_support_weight_scales_its_term():
    text, video = features()
    terms = []
    for weight in (0.8, 0.4, 0.0):
        made = model(support_weight=weight).eval()
        torch.manual_seed(1)
        terms.append(made.losses(paired(text, video)))
    assert [list(term) for term in terms] == [["stochastic", "support"], ["stochastic", "support"], ["stochastic"]]
    torch.testing.assert_close(terms[0]["support"], 2 * terms[1]["support"])
    torch.testing.assert_close(terms[0]["stochastic"], terms[2]["stochastic"])
