"""Density-peak clustering of equal tokens and of tokens with extreme densities; recorded cases are in tests/parity."""

import pytest
import torch

from tvr_lightning.layers.patch_selector import first_largest
from tvr_lightning.methods.dpdv.patch_merging import dpc_knn, merge_tokens

RULES = ["paper", "neighbours", "hbi"]


@pytest.mark.parametrize("rule", RULES)
def test_equal_tokens_have_a_defined_result(rule):
    found = dpc_knn(torch.full((2, 6, 8), 0.3), 3, 3, rule)
    assert found.centre.tolist() == [[0, 1, 2]] * 2
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


def test_weights_weigh_and_gradients_reach_every_token():
    tokens = torch.randn(1, 6, 4, requires_grad=True)
    weight = torch.tensor([[1.0, 2, 3, 4, 5, 6]])
    assignment = torch.tensor([[0, 0, 1, 1, 1, 0]])
    merged = merge_tokens(tokens, assignment, 2, weight)
    expected = (tokens[0, 0] + 2 * tokens[0, 1] + 6 * tokens[0, 5]) / 9
    torch.testing.assert_close(merged[0, 0], expected)
    merged.sum().backward()
    assert bool((tokens.grad != 0).all())


def test_first_largest_takes_the_first_of_equals():
    assert first_largest(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 4).tolist() == [1, 2, 4, 3]
