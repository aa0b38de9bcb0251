"""InfoNCE with weights and in parts; the recorded cases have its equation."""

import math
import re

import pytest
import torch

from tvr_lightning.errors import UserError
from tvr_lightning.training.losses import info_nce, local_info_nce, positive_weights, row_cross_entropy


def logits(size=5, seed=0):
    return 4 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("weight", [None, torch.tensor([0.1, 0.4, 0.2, 0.0, 0.3]).double()])
def test_directions_may_have_different_logits_and_pairs_different_weights(weight):
    matrix, other = logits(), logits(seed=2)
    both = row_cross_entropy(matrix, weight) + row_cross_entropy(other.T, weight)
    torch.testing.assert_close(info_nce(matrix, other, weight=weight), both / 2)
    torch.testing.assert_close(info_nce(matrix, other, weight=weight, reduction="sum"), both)
    assert not positive_weights(matrix.requires_grad_()).requires_grad


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (1,), (), (4,)])
def test_weights_of_another_shape_are_rejected(shape):
    with pytest.raises(UserError, match=rf"one weight per pair, \(5,\), got {re.escape(str(shape))}"):
        info_nce(logits(), weight=torch.full(shape, 0.2))


def test_large_logits_do_not_overflow():
    matrix = 100 * torch.eye(4).mul(2).sub(1)
    assert info_nce(matrix).item() == pytest.approx(0.0, abs=1e-6)
    assert info_nce(-matrix).item() == pytest.approx(200.0 + math.log(3), rel=1e-5)
    with pytest.raises(ValueError, match=r"square logits, got \(3, 4\)"):
        info_nce(torch.zeros(3, 4))


def test_the_losses_of_devices_average_to_the_whole_loss_and_its_gradient():
    whole = logits(6).requires_grad_()
    parts = logits(6).requires_grad_()
    shares = [local_info_nce(parts[i : i + 2], parts[:, i : i + 2], i) for i in (0, 2, 4)]
    info_nce(whole).backward()
    torch.stack(shares).mean().backward()
    assert torch.stack(shares).mean().item() == pytest.approx(info_nce(whole).item())
    torch.testing.assert_close(parts.grad, whole.grad)
