"""Further examples of docs/adding-a-method.md: a loss, a method with state, and a tuning."""

from pathlib import Path

import pytest
import torch
from examples.centering import Centering
from examples.dual_softmax_loss import DualSoftmaxLoss, revised

from tvr_lightning.encoders.tiny import TinyClipEncoder
from tvr_lightning.testing import MethodTestSuite, random_pairs, small

HERE = Path(__file__).parent


class TestCentering(MethodTestSuite):
    recipe = HERE / "centering.yaml"


def test_an_even_prior_changes_nothing_and_a_popular_candidate_counts_less():
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for queries in (0, 1):
        torch.testing.assert_close(revised(logits, queries, temperature=1e9), logits)
    logits = torch.tensor([[2.0, 1.0], [5.0, 1.0]])
    lowered = revised(logits, queries=0, temperature=1.0)
    assert lowered[0, 0] < logits[0, 0]
    assert lowered[1, 0] > logits[1, 0]
    assert torch.equal(lowered[:, 1], logits[:, 1])
    with pytest.raises(ValueError, match="prior_temperature is 0"):
        DualSoftmaxLoss(TinyClipEncoder(64), prior_temperature=0)


def test_the_dual_softmax_loss_trains_the_encoder():
    method, _ = small(HERE / "dual_softmax_loss.yaml")
    method.losses(method.pair_features(random_pairs(method, 4)))["dual_softmax"].backward()
    assert method.encoder.clip.text_projection.grad.any()


@torch.no_grad()
def test_the_means_move_towards_those_of_the_batch_and_change_the_scores():
    method = Centering(TinyClipEncoder(64), momentum=0.75).eval()
    pairs = method.pair_features(random_pairs(method, 6)).detach()
    before = method.score(pairs.text, pairs.video).similarity
    method.update_state(pairs)
    torch.testing.assert_close(method.means[0], 0.25 * pairs.text.sentence.mean(0))
    assert not torch.allclose(method.score(pairs.text, pairs.video).similarity, before, atol=1e-4)


@torch.no_grad()
def test_only_the_factors_are_trained_and_the_scores_start_unchanged():
    scores = []
    for tuning in ("FineTuning", "examples.scaled_outputs.ScaledOutputs"):
        method = small(HERE.parents[1] / "recipes" / "clip4clip.yaml", f"--model.init_args.tuning={tuning}")[0].eval()
        pairs = method.pair_features(random_pairs(method, 4))
        scores.append(method.score(pairs.text, pairs.video).similarity)
    torch.testing.assert_close(*scores)
    trained = [name for name, parameter in method.encoder.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(name.endswith("factors") for name in trained)
