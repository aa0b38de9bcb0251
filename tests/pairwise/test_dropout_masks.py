"""Dropout masks have the distribution of torch's dropout, and their elements are independent."""

import pytest
import torch
from torch.nn import functional as F

from tvr_lightning.pairwise.dropout_masks import dropout_mask


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
