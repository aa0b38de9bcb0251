"""How far our numbers are from the authors'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.parity.case import ParityCase

TOLERANCE = 1e-4
NOISE = 1e-10
"""Magnitude below which numbers that float64 computed are taken for zero."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of a case against ours.

    Attributes:
        name: with its prefix, `expected.*` or `feature.*`.
        shape: of the authors' tensor.
        difference: largest absolute difference; NaN where there is nothing to compare.
        relative: see `relative_difference`; infinite where there is nothing to compare.
        note: why there is nothing to compare, otherwise empty.
    """

    name: str
    shape: tuple[int, ...]
    difference: float
    relative: float
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether ours is within 1e-4 (relative) of the authors'."""
        return self.relative <= TOLERANCE


def relative_difference(ours: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest absolute difference, and its ratio to the scale of the expected tensor: max|a - b| / max(max|b|, floor).

    The scale is that of the whole tensor, since a score near zero is no more exact than its neighbours. The floor keeps
    tensors of zeros comparable: it is the magnitude below which the tolerance would ask for less than one rounding unit
    at 1, 1.2e-3 for float32; for float64 it is 1e-10, below which sums of numbers of order 1 cancel to noise. Whole
    numbers and booleans (indices, counts) must be equal. Infinities and NaN must be at the same places.

    Args:
        ours: any shape.
        expected: the same shape.

    Returns:
        (absolute, relative); both infinite where special values differ, the relative one also where whole numbers do.
    """
    a, b = ours.detach().double().cpu(), expected.double().cpu()
    if not expected.is_floating_point():
        difference = float((a - b).abs().max()) if b.numel() else 0.0
        return difference, 0.0 if difference == 0 else float("inf")
    finite = b.isfinite()
    same_specials = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[b.isinf()], b[b.isinf()])
    if not same_specials or not bool(a[finite].isfinite().all()):
        return float("inf"), float("inf")
    a, b = a[finite], b[finite]
    if not b.numel():
        return 0.0, 0.0
    difference = float((a - b).abs().max())
    floor = max(torch.finfo(expected.dtype).eps / TOLERANCE, NOISE)
    return difference, difference / max(float(b.abs().max()), floor)


def compare(case: ParityCase, ours: Mapping[str, Tensor]) -> list[Comparison]:
    """Compare all expected tensors of a case, and the intermediate features that were computed.

    Args:
        case: the case.
        ours: what we computed, under the names of `case.expected`; features as `feature.{name}`.

    Returns:
        One comparison per tensor, largest relative difference first. A tensor that was not computed, or has another
        shape, is a failure; single numbers may be scalar or (1,).
    """
    found = [_compare(f"expected.{name}", tensor, ours.get(name)) for name, tensor in case.expected.items()]
    for name, tensor in case.features.items():
        if f"feature.{name}" in ours:
            found.append(_compare(f"feature.{name}", tensor, ours[f"feature.{name}"]))
    return sorted(found, key=lambda c: (-c.relative, c.name))


def _compare(name: str, expected: Tensor, ours: Tensor | None) -> Comparison:
    shape = tuple(expected.shape)
    if ours is None:
        return Comparison(name, shape, float("nan"), float("inf"), "not computed")
    if ours.numel() == expected.numel() == 1:
        ours = ours.reshape(expected.shape)
    if tuple(ours.shape) != shape:
        return Comparison(name, shape, float("nan"), float("inf"), f"ours has shape {tuple(ours.shape)}")
    return Comparison(name, shape, *relative_difference(ours, expected))
