"""One case from its file to the table of its differences."""

import math
from dataclasses import dataclass

import torch
from parity.case import CaseError
from parity.compute import COMPUTE

TOLERANCE = 1e-4
"""Largest difference that holds, as a share of the largest value of the authors' tensor."""

NOISE = 1e-10
"""Magnitude below which numbers that float64 computed are taken for zero."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of a case against ours.

    Attributes:
        name: Name with its prefix, `expected.*` or `feature.*`.
        shape: Shape of the authors' tensor.
        difference: Largest absolute difference; infinite if there is nothing to compare.
        scale: Divisor of the difference; 0 if ours must be equal.
        note: Reason if there is nothing to compare.
    """

    name: str
    shape: tuple[int, ...]
    difference: float
    scale: float
    note: str = ""

    @property
    def tolerance(self):
        return TOLERANCE * self.scale

    @property
    def relative(self):
        return self.difference / self.scale if self.scale else 0.0 if self.difference == 0 else math.inf

    @property
    def holds(self):
        return self.relative <= TOLERANCE


def compare_tensor(name, expected, ours):
    """Compare one tensor; single numbers may be scalar or (1,).

    The scale is the largest value of the whole tensor, since a score near zero is no more exact than its neighbors. A
    floor keeps tensors of zeros comparable: for float32 it is 1.2e-3, below which the tolerance would ask for less than
    one rounding unit at 1; for float64 1e-10, below which sums of numbers of order 1 cancel to noise.
    """
    shape = tuple(expected.shape)
    if ours is None:
        return Comparison(name, shape, math.inf, 1.0, "not computed")
    if ours.numel() == expected.numel() == 1:
        ours = ours.reshape(shape)
    if tuple(ours.shape) != shape:
        return Comparison(name, shape, math.inf, 1.0, f"ours has shape {tuple(ours.shape)}")
    a, b = ours.detach().double(), expected.double()
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


def compare(case, ours):
    """Compare all expected tensors of a case, and the intermediate features that were computed.

    Returns:
        One comparison per tensor, largest relative difference first.
    """
    found = [compare_tensor(f"expected.{name}", tensor, ours.get(name)) for name, tensor in case.expected.items()]
    features = {f"feature.{name}": tensor for name, tensor in case.features.items()}
    found += [compare_tensor(name, tensor, ours[name]) for name, tensor in features.items() if name in ours]
    return sorted(found, key=lambda c: (-c.relative, c.name))


def check_case(case):
    """Compute what a case expects and compare it; CaseError if nothing computes it or an input is missing."""
    if case.method not in COMPUTE:
        known = ", ".join(sorted(COMPUTE))
        raise CaseError(f"{case.path}: nothing computes cases of the method {case.method!r}; known: {known}")
    try:
        with torch.no_grad():
            return compare(case, COMPUTE[case.method](case))
    except KeyError as error:
        raise CaseError(f"{case.path}: its config or its checkpoint has no {error}") from error


def table(case, comparisons):
    """Lines of tensor, shape, largest absolute difference and tolerance, in the order given."""
    wrong = sum(not c.holds for c in comparisons)
    verdict = f"{wrong} of {len(comparisons)} tensors differ" if wrong else f"all {len(comparisons)} tensors hold"
    width, lines = max(len(c.name) for c in comparisons), [f"{case.path}: {case.method}, {verdict}"]
    for c in comparisons:
        shape, note = "x".join(map(str, c.shape)) or "scalar", "" if c.holds else f"  {c.note or 'differs'}"
        tolerance = f"{c.tolerance:.1e}" if c.tolerance else "exact"
        lines.append(f"{c.name:{width}}  {shape:12}  {c.difference:.1e}  {tolerance}{note}")
    return "\n".join(lines)
