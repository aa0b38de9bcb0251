"""Dropout masks have the distribution of torch's dropout, and vectors after dropout are equal in both forms."""

import pytest
import torch
from methods.parts import FORMS, close
from torch import nn
from torch.nn import functional as F

from tvr_lightning.pairwise.dropout_masks import dropout_mask

M, K, N, D, T = 20, 5, 45, 64, 7


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def layers(seed=1):
    torch.manual_seed(seed)
    made = nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D)
    for layer in made:
        for parameter in layer.parameters():
            parameter.data = torch.randn_like(parameter, dtype=torch.double) / 4
    return [layer.double() for layer in made]


def after_dropout(form, slots, whole=True, weights=None, frames=None):
    """X-Pool's feed-forward over mixed frames, and all that a gradient may reach."""
    first, branch, last = layers()
    weights = normal(M, K, N, slots).softmax(1) if weights is None else weights
    frames = normal(M, K, D, seed=2) if frames is None else frames
    hidden = form.mix(weights, frames).layer_norm(first)
    dropped = hidden.linear(branch).dropout(0.3)
    parameters = [weights, frames, *first.parameters(), *branch.parameters(), *last.parameters()]
    return (hidden + dropped if whole else dropped).layer_norm(last), parameters


@pytest.mark.parametrize("to_unit", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("slots", [1, 12])  # more elements than a piece has
def test_products_and_gradients_are_the_same_in_both_forms(slots, whole, to_unit):
    found = []
    for form in FORMS.values():
        torch.manual_seed(0)
        texts = normal(N, T, D, seed=3).requires_grad_()
        weights, frames = normal(M, K, N, slots).softmax(1).requires_grad_(), normal(M, K, D, seed=2).requires_grad_()
        vectors, parameters = after_dropout(form, slots, whole, weights, frames)
        vectors = vectors.unit() if to_unit else vectors
        first, others = vectors.divided(slots // 2) if slots > 1 else (vectors, vectors)
        products = [*first.dots(texts[:, :2], texts[:, 2:]), others.dot(texts)]
        loss = torch.stack([(each.sin() * place).sum() for place, each in enumerate(products, 1)]).sum()
        found.append([*products, *torch.autograd.grad(loss, [texts, *parameters])])
    close(*found)


@pytest.mark.parametrize("bias", [None, True, False])
@pytest.mark.parametrize("slots", [1, 12])
def test_materialized_vectors_have_the_same_gradients_in_both_forms(slots, bias):
    found = []
    layer = nn.Linear(D, D, bias=bool(bias)).double()
    for form in FORMS.values():
        torch.manual_seed(0)
        weights, frames = normal(M, K, N, slots).softmax(1).requires_grad_(), normal(M, K, D, seed=2).requires_grad_()
        vectors, parameters = after_dropout(form, slots, weights=weights, frames=frames)
        if bias is not None:
            vectors, parameters = vectors.linear(layer), [*parameters, *layer.parameters()]
        made = vectors.materialize()
        found.append([made, *torch.autograd.grad(made.sin().sum(), parameters)])
    close(*found)


def dropped(values, probability):
    mask, scale = dropout_mask(values.shape, probability, values.device)
    return values * mask * scale


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.9])
def test_means_and_variances_match_dropout_of_torch(probability):
    torch.manual_seed(0)
    values = torch.randn(400_003) + 2
    found, torchs = (
        torch.stack([function(values, probability) for _ in range(5)]) for function in (dropped, F.dropout)
    )
    count = found.numel()
    for one, other in ((found, torchs), (found.square(), torchs.square()), (1.0 * (found == 0), 1.0 * (torchs == 0))):
        error = ((one.var() + other.var()) / count).sqrt()
        assert abs(one.mean() - other.mean()) < 5 * error
    assert (found == 0).float().mean().item() == pytest.approx(probability, abs=5 * (0.25 / count) ** 0.5)
    kept = found[0] != 0
    torch.testing.assert_close(found[0][kept], values[kept] / (1 - probability), rtol=2e-4, atol=0)


def test_elements_are_dropped_independently_of_each_other_and_of_earlier_draws():
    torch.manual_seed(0)
    zero = 1.0 * (torch.stack([dropped(torch.ones(100_000), 0.3) for _ in range(2)]) == 0)
    zero = (zero - zero.mean()) / zero.std()
    correlations = [float((zero[0, :-lag] * zero[0, lag:]).mean()) for lag in (1, 2, 3, 4, 8, 512)]
    correlations.append(float((zero[0] * zero[1]).mean()))
    assert max(map(abs, correlations)) < 5 / 100_000**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 5, 8, 1000])
def test_masks_of_any_size_and_precision_follow_the_seed(count, dtype):
    values = torch.randn(count, 1, dtype=dtype, requires_grad=True)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(dropped(values, 0.5))
    (gradient,) = torch.autograd.grad(draws[0].sum(), values)
    assert draws[0].dtype == dtype
    assert torch.equal(gradient != 0, draws[0] != 0)
    assert torch.equal(draws[0], draws[1])
    assert count < 1000 or not torch.equal(draws[0], draws[2])
