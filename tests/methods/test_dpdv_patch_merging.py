"""Patch merging: its schedules, its options, and clusters of tied, equal and few tokens.

The recorded cases have clusters of random tokens.
"""

import pytest
import torch

from tvr_lightning.methods.dpdv.options import PatchMerging
from tvr_lightning.methods.dpdv.patch_merging import PatchFeatureMerging, dpc_knn, merge_tokens


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


@pytest.mark.parametrize(
    ("points", "neighbors", "rule", "delta", "center", "assignment"),
    [
        ([0, 1, 2, 3, 4], 2, "paper", [4, 3, 2, 3, 4], [0, 4], [0, 0, 0, 1, 1]),
        ([0, 1, 2, 3, 4], 2, "neighbors", [1, 3, 2, 3, 1], [1, 3], [0, 0, 0, 1, 1]),
        ([0, 1, 2, 3, 4], 2, "hbi", [4, 4, 4, 4, 4], [0, 1], [0, 1, 1, 1, 1]),
        ([0, 0, 1, 5, 6], 4, "paper", [6, 6, 5, 4, 1], [0, 1], [0, 1, 0, 0, 0]),
        ([0, 0, 1, 5, 6], 9, "neighbors", [1, 1, 5, 4, 1], [2, 3], [0, 0, 0, 1, 1]),
        ([0, 0, 1, 5, 6], 9, "hbi", [1, 1, 6, 4, 1], [2, 3], [0, 0, 0, 1, 1]),
        ([5], 3, "neighbors", [0], [0], [0]),
    ],
)
def test_ties_and_few_tokens_are_clustered_by_the_definition(points, neighbors, rule, delta, center, assignment):
    found = dpc_knn(torch.tensor(points, dtype=torch.float64)[:, None], len(center), neighbors, rule)
    assert bool((found.density > 0).all())
    assert found.delta.tolist() == delta
    assert found.center.tolist() == center
    assert found.assignment.tolist() == assignment


@pytest.mark.parametrize("rule", ["paper", "neighbors", "hbi"])
def test_equal_tokens_have_a_defined_result(rule):
    found = dpc_knn(torch.full((2, 6, 8), 0.3), 3, 3, rule)
    assert found.center.tolist() == [[0, 1, 2]] * 2
    assert found.assignment.tolist() == [[0, 1, 2, 0, 0, 0]] * 2
    assert torch.equal(found.delta, torch.zeros(2, 6))
    assert torch.equal(merge_tokens(torch.full((2, 6, 8), 0.25), found.assignment, 3), torch.full((2, 3, 8), 0.25))


def test_densities_that_underflow_keep_their_order():
    tokens = 100 * torch.randn(40, 20, 16, generator=torch.Generator().manual_seed(0))
    single, double = dpc_knn(tokens, 10), dpc_knn(tokens.double(), 10)
    assert torch.equal(single.density, torch.zeros(40, 20))
    assert bool((double.density > 0).all())
    assert torch.equal(single.assignment, double.assignment)


def test_bfloat16_tokens_are_clustered_in_float32():
    tokens = torch.randn(2, 20, 16).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = dpc_knn(tokens, 10)
    assert found.density.dtype == torch.float32
    assert torch.equal(found.assignment, dpc_knn(tokens.float(), 10).assignment)
