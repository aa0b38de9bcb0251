"""The text-conditioned method of docs/adding-a-method.md: scores, options, and the common tests."""

from pathlib import Path

import pytest
import torch
from examples.query_scoring import QueryScoring, QueryScoringHead, QueryScoringOptions

from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.testing import MethodTestSuite
from tvr_lightning.training.optim import OptimizerConfig, parameter_groups

N, M, F, D = 5, 4, 6, 64


class TestQueryScoring(MethodTestSuite):
    """Tests that every method must pass."""

    recipe = Path(__file__).parent / "query_scoring.yaml"


@pytest.fixture
def features():
    generator = torch.Generator().manual_seed(0)
    sentence, frames = torch.randn(N, D, generator=generator), torch.randn(M, F, D, generator=generator)
    mask = torch.arange(F) < torch.tensor([6, 4, 1, 6])[:, None]
    text = TextFeatures(sentence, sentence[:, None], torch.ones(N, 1, dtype=torch.bool))
    return text, VideoFeatures(frames, mask)


def head(temperature=0.1):
    return QueryScoringHead(D, F, QueryScoringOptions(temperature)).eval()


@torch.no_grad()
@pytest.mark.parametrize("form", [PairVectors, DensePairVectors])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_scores_are_those_of_the_formula_written_out(features, form, temperature):
    made, (text, video) = head(temperature), features
    made.required_form = form
    found = made(text, video).similarity
    for i, sentence in enumerate(text.sentence / text.sentence.norm(dim=-1, keepdim=True)):
        for j, all_frames in enumerate(video.frames):
            frames = all_frames[video.frame_mask[j]]
            frames = frames / frames.norm(dim=-1, keepdim=True)
            pooled = (frames @ sentence / temperature).softmax(0) @ frames
            torch.testing.assert_close(found[i, j], sentence @ pooled / pooled.norm())


def test_the_cheaper_form_is_taken_and_counts_less_memory(features):
    made = head()
    prepared = made.prepare(*features)
    assert made.form is PairVectors
    factorized = made.pair_numbers(*prepared)
    made.required_form = DensePairVectors
    assert factorized == 8 * (F + 4) < made.pair_numbers(*prepared) == 8 * D


def test_the_temperature_trains_at_the_method_s_rate_without_decay_or_not_at_all():
    config = OptimizerConfig(decay="no-bias-no-norm")
    learned, fixed = (QueryScoring(TinyClipEncoder(64), QueryScoringOptions(learned=value)) for value in (True, False))
    groups = {group["name"]: group["params"] for group in parameter_groups(learned, config)}
    assert groups["method, not decayed"] == [learned.head.log_temperature]
    assert not any(group["name"].startswith("method") for group in parameter_groups(fixed, config))


def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"QueryScoringOptions\.temperature is 0; expected"):
        QueryScoringOptions(temperature=0)
