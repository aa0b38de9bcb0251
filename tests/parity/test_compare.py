"""What counts as a difference."""

import math

import pytest
import torch
from parity.case import ParityCase
from parity.compare import compare, compare_tensor


def relative(ours, expected):
    return compare_tensor("any", expected, ours).relative


def test_the_difference_is_relative_to_the_largest_value():
    expected = torch.tensor([1000.0, 0.001])
    found = compare_tensor("any", expected, expected + torch.tensor([0.0, 0.05]))
    assert found.relative == pytest.approx(5e-5, rel=1e-2)
    assert found.difference == pytest.approx(0.05, rel=1e-2)
    assert found.tolerance == pytest.approx(0.1)
    small = torch.tensor([1e-2])
    assert relative(small * 1.001, small) == pytest.approx(1e-3, rel=1e-3)


def test_rounding_noise_around_zero_passes_and_more_does_not():
    zero = torch.zeros(3)
    assert relative(zero + 1e-7, zero) < 1e-4 < relative(zero + 1e-6, zero)
    exact = torch.zeros(3, dtype=torch.float64)
    assert relative(exact + 1e-16, exact) < 1e-4 < relative(exact + 1e-13, exact)


def test_special_values_must_be_at_the_same_places():
    expected = torch.tensor([1.0, -math.inf, math.nan])
    assert relative(expected.clone(), expected) == 0.0
    for other in (
        [1.0, math.inf, math.nan],
        [1.0, 0.0, math.nan],
        [1.0, -math.inf, 0.5],
        [math.nan, -math.inf, math.nan],
    ):
        assert relative(torch.tensor(other), expected) == math.inf
    assert relative(torch.full((2,), -math.inf), torch.full((2,), -math.inf)) == 0.0
    assert relative(torch.zeros(0), torch.zeros(0)) == 0.0


def test_whole_numbers_must_be_equal():
    expected = torch.tensor([10_000_000, 3])
    assert relative(expected.clone(), expected) == 0.0
    found = compare_tensor("any", expected, expected + torch.tensor([1, 0]))
    assert (found.difference, found.relative, found.tolerance, found.holds) == (1.0, math.inf, 0.0, False)


def test_shapes_names_and_order(tmp_path):
    case = ParityCase(tmp_path / "x", "any", expected={"a": torch.ones(2), "b": torch.ones(2, 3), "c": torch.ones(1)})
    case.features["f"] = torch.ones(2)
    found = compare(case, {"a": torch.ones(2), "b": torch.ones(3, 2), "c": torch.ones(()), "feature.f": torch.zeros(2)})
    assert [(c.name, c.holds) for c in found] == [
        ("expected.b", False),
        ("feature.f", False),
        ("expected.a", True),
        ("expected.c", True),
    ]
    assert found[0].note == "ours has shape (3, 2)"
    assert [c.note for c in compare(case, {}) if not c.holds] == ["not computed"] * 3
