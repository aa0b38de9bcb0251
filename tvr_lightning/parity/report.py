"""`tvr parity`: case by case, the largest differences from the authors' code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tvr_lightning.parity.case import ParityCase, ParityError, load_case
from tvr_lightning.parity.compare import TOLERANCE, Comparison, compare
from tvr_lightning.parity.methods import COMPUTE


def check_case(case: ParityCase) -> list[Comparison]:
    """Compute what a case expects and compare it.

    Returns:
        One comparison per tensor, largest relative difference first.

    Raises:
        ParityError: nothing implements the case's method, or its checkpoint does not fit.
    """
    compute = COMPUTE.get(case.method)
    if compute is None:
        raise ParityError(
            f"{case.path}: nothing implements the method {case.method!r}; known: {', '.join(sorted(COMPUTE))}"
        )
    with torch.no_grad():
        return compare(case, compute(case))


def run_parity(files: Sequence[Path], rows: int = 12) -> int:
    """Compare our numbers with those of the authors' code, case by case.

    Args:
        files: parity cases (.safetensors); the metadata says which method and options.
        rows: how many tensors a table shows, largest relative difference first; failing ones are always shown.

    Returns:
        0 where every expected tensor of every case is within 1e-4 (relative), else 1.
    """
    console = Console()
    failed = []
    for path in files:
        try:
            case = load_case(Path(path))
            comparisons = check_case(case)
        except ParityError as error:
            console.print(f"{error}", style="red", highlight=False, markup=False, soft_wrap=True)
            failed.append(str(path))
            continue
        console.print(_table(case, comparisons, rows))
        if not all(comparison.holds for comparison in comparisons):
            failed.append(str(path))
    if failed:
        console.print(
            f"{len(failed)} of {len(files)} cases differ by more than {TOLERANCE:g} (relative) or cannot be compared: "
            + ", ".join(failed),
            style="red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return 1
    console.print(f"{len(files)} of {len(files)} cases agree within {TOLERANCE:g} (relative)", highlight=False)
    return 0


def _table(case: ParityCase, comparisons: Sequence[Comparison], rows: int) -> Table:
    shown = [c for i, c in enumerate(comparisons) if i < rows or not c.holds]
    title = escape(f"{case.path.name}: {case.method}, {len(comparisons)} tensors")
    hidden = len(comparisons) - len(shown)
    table = Table(title=title, caption=f"{hidden} more with smaller differences" if hidden else None)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    for column in ("difference", "relative"):
        table.add_column(column, justify="right")
    table.add_column("")
    for c in shown:
        numbers = (f"{c.difference:.1e}", f"{c.relative:.1e}") if not c.note else ("", "")
        verdict = "[green]holds" if c.holds else f"[red]{c.note or 'differs'}"
        table.add_row(escape(c.name), "x".join(map(str, c.shape)) or "scalar", *numbers, verdict)
    return table
