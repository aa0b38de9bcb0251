"""Patch merging: the schedules of the paper, one stage as an equation, and the effect of each option."""

import pytest
import torch

from tvr_lightning.methods.dpdv.options import PatchMerging
from tvr_lightning.methods.dpdv.patch_merging import PatchFeatureMerging


def merging(**options):
    torch.manual_seed(0)
    return PatchFeatureMerging(16, PatchMerging(**{"heads": 2, **options})).eval()


@pytest.mark.parametrize(
    ("ratio", "patches", "counts"),
    [
        (0.5, 49, [25, 13, 7]),  # Table S10
        (0.75, 49, [37, 28, 21]),
        (0.0625, 49, [4, 1, 1]),  # its row ".25"
        (0.5, 196, [98, 49, 25]),  # ViT-B/16
        (1.0, 5, [5, 5, 5]),
        (0.5, 1, [1, 1, 1]),
    ],
)
def test_the_numbers_of_patches_are_those_of_the_paper(ratio, patches, counts):
    assert PatchMerging(ratio=ratio).schedule(patches) == counts
    merged = merging(ratio=ratio)(torch.randn(2, 2, patches, 16))
    assert merged.shape == (2, 2, counts[-1], 16)


CHANGES = {"neighbors": [1], "density": ["neighbors", "hbi"], "weights": ["scored"], "heads": [4], "keys": ["merged"]}
CHANGES |= {"stages": [2], "ratio": [0.4]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CHANGES.items() for value in values])
def test_every_option_changes_the_result(name, value):
    patches = torch.randn(2, 3, 30, 16, generator=torch.Generator().manual_seed(3))
    plain, other = merging()(patches), merging(**{name: value})(patches)
    assert plain.shape != other.shape or not torch.allclose(plain, other, atol=1e-3)


def test_every_stage_learns_and_identical_patches_have_finite_gradients():
    made = merging(weights="scored").train()
    made(torch.randn(1, 2, 20, 16)).square().sum().backward()
    assert all(bool((p.grad != 0).any()) for name, p in made.named_parameters() if not name.endswith("score.bias"))
    patches = torch.ones(1, 2, 9, 16, requires_grad=True)
    merged = merging()(patches)
    merged.sum().backward()
    assert bool(merged.isfinite().all())
    assert bool(patches.grad.isfinite().all())
