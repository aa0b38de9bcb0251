"""One case from its file to the table of its differences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from parity.case import CaseError, ParityCase
from parity.compare import Comparison, compare
from parity.compute import COMPUTE


def check_case(case: ParityCase) -> list[Comparison]:
    """Compute what a case expects and compare it.

    Returns:
        One comparison per tensor, largest relative difference first.

    Raises:
        CaseError: nothing computes cases of this method, or the case lacks what its method needs.
        UserError: its checkpoint does not fit.
    """
    compute = COMPUTE.get(case.method)
    if compute is None:
        raise CaseError(
            f"{case.path}: nothing computes cases of the method {case.method!r}; known: {', '.join(sorted(COMPUTE))}"
        )
    with torch.no_grad():
        return compare(case, compute(case))


def table(case: ParityCase, comparisons: Sequence[Comparison]) -> str:
    """Lines of tensor, shape, largest absolute difference and tolerance, in the order given."""
    rows = [("tensor", "shape", "difference", "tolerance", "")]
    for c in comparisons:
        shape = "x".join(map(str, c.shape)) or "scalar"
        tolerance = f"{c.tolerance:.1e}" if c.tolerance else "exact"
        rows.append((c.name, shape, f"{c.difference:.1e}", tolerance, "" if c.holds else c.note or "differs"))
    name, shape, *_ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{a:{name}}  {b:{shape}}  {c:>10}  {d:>9}  {e}".rstrip() for a, b, c, d, e in rows]
    wrong = sum(not c.holds for c in comparisons)
    verdict = f"{wrong} of {len(comparisons)} tensors differ" if wrong else f"all {len(comparisons)} tensors hold"
    return "\n".join([f"{case.path}: {case.method}, {verdict}", *lines])
