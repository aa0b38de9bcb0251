"""The radius of T-MASS and its random draws."""

import pytest
import torch

from tvr_lightning.layers.stochastic import Normal, Radius, Uniform, trial_draws

N, M, F, D, K = 3, 4, 5, 8, 6


def test_the_radius_starts_at_the_similarities_and_one():
    similarity = torch.rand(M, N, F)
    made = Radius(F, D)(similarity).exp()
    torch.testing.assert_close(made[..., :F], similarity.exp())
    torch.testing.assert_close(made[..., F:], torch.ones(M, N, D - F))


def test_a_scalar_radius_depends_on_the_mean_similarity_with_real_frames():
    radius, similarity = Radius(F, D, "scalar"), torch.rand(N, F)
    radius.theta.data.fill_(2.0)
    for mask, kept in ((torch.arange(F) < 3, 3), (None, F)):
        expected = (2 * similarity[:, :kept].mean(-1, keepdim=True)).expand(N, D)
        torch.testing.assert_close(radius(similarity, mask), expected)


def test_priors_have_their_mean_and_deviation():
    generator = torch.Generator().manual_seed(0)
    uniform, normal = Uniform(), Normal(0.3)
    drawn = uniform.draw((20000,), generator)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean().item() == pytest.approx(uniform.mean, abs=0.01)
    drawn = normal.draw((20000,), generator)
    assert drawn.mean().item() == pytest.approx(normal.mean, abs=0.01)
    assert drawn.std().item() == pytest.approx(0.3, rel=0.05)


def test_draws_of_an_evaluation_follow_its_seed():
    first = trial_draws(Uniform(), K, D, seed=1)
    assert first.shape == (K, D)
    assert torch.equal(first, trial_draws(Uniform(), K, D, seed=1))
    assert not torch.equal(first, trial_draws(Uniform(), K, D, seed=2))
    assert torch.equal(trial_draws(Uniform(), "mean", D, seed=1), torch.full((1, D), 0.5))
    assert torch.equal(trial_draws(Normal(), "mean", D, seed=1), torch.zeros(1, D))
