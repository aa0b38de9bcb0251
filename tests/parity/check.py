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
    """One tensor of a case, `expected.*` or `feature.*`, against ours.

    The difference is the largest absolute one, and infinite if there is nothing to compare, as the note explains. It is
    divided by the scale, or must be 0 if the scale is 0.
    """

    name: str
    shape: tuple[int, ...]
    difference: float = math.inf
    scale: float = 1.0
    note: str = ""

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
        return Comparison(name, shape, note="not computed")
    if ours.numel() == expected.numel() == 1:
        ours = ours.reshape(shape)
    if tuple(ours.shape) != shape:
        return Comparison(name, shape, note=f"ours has shape {tuple(ours.shape)}")
    a, b = ours.detach().double(), expected.double()
    finite = b.isfinite()
    same_specials = torch.equal(a.isnan(), b.isnan()) and torch.equal(a[b.isinf()], b[b.isinf()])
    if not same_specials or not bool(a[finite].isfinite().all()):
        return Comparison(name, shape, note="infinities or NaN elsewhere")
    a, b = a[finite], b[finite]
    difference = float((a - b).abs().max()) if b.numel() else 0.0
    if not expected.is_floating_point() or not b.numel():
        return Comparison(name, shape, difference, 0.0)
    floor = max(torch.finfo(expected.dtype).eps / TOLERANCE, NOISE)
    return Comparison(name, shape, difference, max(float(b.abs().max()), floor))


def check_case(case):
    """Compute what a case expects, and its intermediate features if possible.

    Returns:
        One comparison per tensor, largest relative difference first.

    Raises:
        CaseError: Nothing computes the case, or a tensor or an option is missing.
    """
    if case.method not in COMPUTE:
        raise CaseError(f"{case.path}: nothing computes cases of {case.method!r}; known: {', '.join(sorted(COMPUTE))}")
    try:
        with torch.no_grad():
            ours = COMPUTE[case.method](case)
    except KeyError as error:
        raise CaseError(f"{case.path}: a {case.method} case needs {error}") from error
    found = [compare_tensor(f"expected.{name}", tensor, ours.get(name)) for name, tensor in case.expected.items()]
    features = {f"feature.{name}": tensor for name, tensor in case.features.items()}
    found += [compare_tensor(name, tensor, ours[name]) for name, tensor in features.items() if name in ours]
    return sorted(found, key=lambda c: (-c.relative, c.name))


def table(case, comparisons):
    """Lines of tensor, shape, largest absolute difference and tolerance, in the order given."""
    wrong = sum(not c.holds for c in comparisons)
    verdict = f"{wrong} of {len(comparisons)} tensors differ" if wrong else f"all {len(comparisons)} tensors hold"
    lines = [f"{case.path}: {case.method}, {verdict}"]
    for c in comparisons:
        shape, note = "x".join(map(str, c.shape)) or "scalar", "" if c.holds else f"  {c.note or 'differs'}"
        lines.append(f"{c.name:60}  {shape:12}  {c.difference:.1e}  {TOLERANCE * c.scale:.1e}{note}")
    return "\n".join(lines)
