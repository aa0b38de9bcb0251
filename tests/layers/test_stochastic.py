"""Radius, draws and support vector: what T-MASS says of a text's region."""

import pytest
import torch

from tvr_lightning.layers.stochastic import Normal, Radius, Uniform, support_text, trial_cosines, trial_draws

N, M, F, D, K = 3, 4, 5, 8, 6


@pytest.fixture
def pair_vectors():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.double)

    return normal(N, D), normal(M, N, D).exp(), normal(M, N, D), normal(K, D)


def test_the_radius_starts_at_the_similarities_and_one():
    similarity = torch.rand(M, N, F)
    made = Radius(F, D)(similarity).exp()
    torch.testing.assert_close(made[..., :F], similarity.exp())
    torch.testing.assert_close(made[..., F:], torch.ones(M, N, D - F))


@pytest.mark.parametrize("kind", ["linear", "scalar"])
def test_padded_frames_do_not_change_the_radius(kind):
    radius, mask = Radius(F, D, kind), torch.tensor([True, True, True, False, False])
    similarity = torch.rand(N, F)
    found = radius(similarity, mask)
    assert torch.equal(radius(torch.where(mask, similarity, torch.rand(N, F)), mask), found)
    if kind == "scalar":  # the same in all dimensions
        radius.theta.data.fill_(2.0)
        for there, kept in ((mask, 3), (None, F)):
            expected = (2 * similarity[:, :kept].mean(-1, keepdim=True)).expand(N, D)
            torch.testing.assert_close(radius(similarity, there), expected)


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


def test_trial_cosines_are_those_of_the_drawn_texts(pair_vectors):
    text, radius, video, draws = pair_vectors
    drawn = text + radius.unsqueeze(1) * draws[:, None]  # (M, K, N, D)
    expected = torch.cosine_similarity(drawn, video.unsqueeze(1), dim=-1)
    torch.testing.assert_close(trial_cosines(text, radius, video, draws), expected)


def test_the_support_text_lies_on_the_way_to_the_video_as_far_as_the_radius():
    text, video = torch.randn(N, D), torch.randn(N, D)
    moved = support_text(text, video, torch.full((N, D), 2.0)) - text
    torch.testing.assert_close(moved.norm(dim=-1), torch.full((N,), 2.0))
    torch.testing.assert_close(torch.cosine_similarity(moved, video - text, dim=-1), torch.ones(N))
