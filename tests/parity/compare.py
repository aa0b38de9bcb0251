"""How far our numbers are from the authors'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from parity.case import ParityCase
from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference that holds, as a share of the largest value of the authors' tensor."""

NOISE = 1e-10
"""Magnitude below which numbers that float64 computed are taken for zero."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of a case against ours.

    Attributes:
        name: with its prefix, `expected.*` or `feature.*`.
        shape: of the authors' tensor.
        difference: largest absolute difference; infinite where there is nothing to compare.
        scale: what it is divided by; 0 where ours must be equal.
        note: why there is nothing to compare, otherwise empty.
    """

    name: str
    shape: tuple[int, ...]
    difference: float
    scale: float
    note: str = ""

    @property
    def tolerance(self) -> float:
        """Largest absolute difference that holds."""
        return TOLERANCE * self.scale

    @property
    def relative(self) -> float:
        """Difference over scale; infinite where equal numbers are not."""
        return self.difference / self.scale if self.scale else 0.0 if self.difference == 0 else math.inf

    @property
    def holds(self) -> bool:
        """Whether ours is within the tolerance."""
        return self.relative <= TOLERANCE


def compare_tensor(name: str, expected: Tensor, ours: Tensor | None) -> Comparison:
    """Compare one tensor.

    The scale is the largest value of the whole tensor, since a score near zero is no more exact than its neighbours. A
    floor keeps tensors of zeros comparable: the magnitude below which the tolerance would ask for less than one
    rounding unit at 1, 1.2e-3 for float32; for float64 it is 1e-10, below which sums of numbers of order 1 cancel to
    noise. Whole numbers and booleans (indices, counts) must be equal. Infinities and NaN must be at the same places.
    Single numbers may be scalar or (1,).
    """
    shape = tuple(expected.shape)
    if ours is None:
        return Comparison(name, shape, math.inf, 1.0, "not computed")
    if ours.numel() == expected.numel() == 1:
        ours = ours.reshape(shape)
    if tuple(ours.shape) != shape:
        return Comparison(name, shape, math.inf, 1.0, f"ours has shape {tuple(ours.shape)}")
    a, b = ours.detach().double().cpu(), expected.double().cpu()
    if not expected.is_floating_point():
        return Comparison(name, shape, float((a - b).abs().max()) if b.numel() else 0.0, 0.0)
    finite = b.isfinite()
    same_specials = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[b.isinf()], b[b.isinf()])
    if not same_specials or not bool(a[finite].isfinite().all()):
        return Comparison(name, shape, math.inf, 1.0, "infinities or NaN elsewhere")
    a, b = a[finite], b[finite]
    if not b.numel():
        return Comparison(name, shape, 0.0, 0.0)
    floor = max(torch.finfo(expected.dtype).eps / TOLERANCE, NOISE)
    return Comparison(name, shape, float((a - b).abs().max()), max(float(b.abs().max()), floor))


def compare(case: ParityCase, ours: Mapping[str, Tensor]) -> list[Comparison]:
    """Compare all expected tensors of a case, and the intermediate features that were computed.

    Args:
        case: the case.
        ours: what we computed, under the names of `case.expected`; features as `feature.{name}`.

    Returns:
        One comparison per tensor, largest relative difference first. A tensor that was not computed, or has another
        shape, does not hold.
    """
    found = [compare_tensor(f"expected.{name}", tensor, ours.get(name)) for name, tensor in case.expected.items()]
    for name, tensor in case.features.items():
        if f"feature.{name}" in ours:
            found.append(compare_tensor(f"feature.{name}", tensor, ours[f"feature.{name}"]))
    return sorted(found, key=lambda c: (-c.relative, c.name))
