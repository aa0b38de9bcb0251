"""Density-peak clustering against the paper's definition in plain loops, on random, tied and equal tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tvr_lightning.layers.patch_selector import first_largest
from tvr_lightning.methods.dpdv.patch_merging import dpc_knn, merge_tokens

RULES = ["paper", "neighbors", "hbi"]


def plain_clusters(points, clusters, neighbors, rule):
    """The definition, token by token: log densities, deltas, centers and assignment."""
    count = len(points)
    scale = math.sqrt(len(points[0])) if rule == "hbi" else 1.0
    distance = [[math.dist(a, b) / scale for b in points] for a in points]
    log_density = []
    for i in range(count):
        others = sorted(distance[i][j] for j in range(count) if rule != "neighbors" or j != i)[:neighbors]
        values = [d * d for d in others] if rule == "hbi" else others
        log_density.append(-sum(values) / len(values) if values else 0.0)
    delta = []
    for i in range(count):
        denser = [distance[i][j] for j in range(count) if log_density[j] > log_density[i]]
        largest = max(map(max, distance)) if rule == "hbi" else max(distance[i])
        delta.append(min(denser) if denser else largest)
    value = [log_density[i] + (math.log(delta[i]) if delta[i] else -math.inf) for i in range(count)]
    center = sorted(range(count), key=lambda i: -value[i])[:clusters]  # sorting keeps the order of equals
    assignment = []
    for i in range(count):
        assignment.append(
            center.index(i) if i in center else min(range(clusters), key=lambda k: distance[i][center[k]])
        )
    return log_density, delta, center, assignment


def check(points, clusters, neighbors, rule):
    found = dpc_knn(torch.tensor(points, dtype=torch.float64), clusters, neighbors, rule)
    log_density, delta, center, assignment = plain_clusters(points, clusters, neighbors, rule)
    torch.testing.assert_close(found.density, torch.tensor(log_density, dtype=torch.float64).exp())
    torch.testing.assert_close(found.delta, torch.tensor(delta, dtype=torch.float64))
    assert found.center.tolist() == center
    assert found.assignment.tolist() == assignment


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tokens_are_clustered_by_the_definition(data):
    count = data.draw(st.integers(1, 9))
    clusters, rule = data.draw(st.integers(1, count)), data.draw(st.sampled_from(RULES))
    if data.draw(st.booleans()):
        torch.manual_seed(data.draw(st.integers(0, 1000)))
        check(torch.randn(count, 3, dtype=torch.float64).tolist(), clusters, data.draw(st.integers(1, 5)), rule)
    else:  # of integers on a line, distances and means of 1, 2 or 4 are exact, so that ties are ties
        points = data.draw(st.lists(st.integers(-4, 4), min_size=count, max_size=count))
        check([[float(x)] for x in points], clusters, data.draw(st.sampled_from([1, 2, 4])), rule)


@pytest.mark.parametrize("rule", RULES)
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
