"""`tvr report`: a folder of pages about runs, with tables as Markdown, CSV, and LaTeX."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from rich.console import Console

from tvr_lightning.errors import UserError
from tvr_lightning.places import Place
from tvr_lightning.progress import shown
from tvr_lightning.recipe_files import recipes_folder
from tvr_lightning.reproduce.profile.card import read_profiles
from tvr_lightning.reproduce.report.figures.drawing import FAILURES, Arrays, shortened
from tvr_lightning.reproduce.report.figures.figure_types import figures_of
from tvr_lightning.reproduce.report.site import Site
from tvr_lightning.reproduce.report.sources import Run, read_runs
from tvr_lightning.reproduce.report.table_view import TableView, view_table
from tvr_lightning.reproduce.tables import known_tables, load_table

Runs = Annotated[Path, Place("folder", "create one with tvr reproduce TABLE --out {path}")]


def run_report(directory: Runs, recipes: Path = Path("recipes"), tables_only: bool = False) -> int:
    """Write the results of `tvr reproduce` or `tvr fit` to a folder of pages, report/index.html first.

    The figures are drawn from each run's own weights and test split: one pass, stored in figures/.

    Args:
        directory: folder that `tvr reproduce --out` wrote, or a folder of runs of `tvr fit`.
        recipes: folder of the recipes, whose tables map runs to published rows.
        tables_only: omit the figures that need weights and videos.
    """
    console = Console(highlight=False, soft_wrap=True)
    runs = read_runs(directory)
    arrays: dict[str, Arrays] = {}
    missing: dict[str, str] = {}
    with shown(lambda: f"report: {len(arrays) + len(missing)} of {len(runs)} runs done", console):
        views = views_of(runs, recipes_folder(recipes))
        for place, run in enumerate(runs, start=1):
            reason = _without_figures(run)
            if reason is None and tables_only:
                continue
            if reason is None:
                console.print(f"[{place}/{len(runs)}] figures of {run.card.name}", markup=False)
                try:
                    with _quiet():
                        arrays[run.key] = figures_of(run, directory / "figures")
                except FAILURES as error:  # the page states it; other runs keep their figures
                    reason = shortened(error)
            if reason is not None:
                missing[run.key] = reason
                console.print(f"No figures of {run.card.name}: {reason}", markup=False)
    with shown("report: comparing the runs and writing the pages", console):
        site = Site(directory / "report", views, runs, arrays, missing, read_profiles(directory / "profiles"))
        written = site.write()
    for path in written:
        console.print(f"Wrote {path}", markup=False)
    return 0


def _without_figures(run: Run) -> str | None:
    if not run.finished:
        return "the run failed"
    return "the run only stored features" if run.card.features is not None else None


def views_of(runs: Sequence[Run], recipes: Path) -> list[TableView]:
    """Return every table that the runs stand for rows of, sorted by name.

    Raises:
        UserError: A run stands for a row of a table that is missing in the recipes.
    """
    claimed = {claim.partition("/")[0] for run in runs for claim in run.claims}
    if unknown := sorted(claimed - set(known_tables(recipes))):
        raise UserError(f"The cards belong to tables that are missing in {recipes / 'tables'}: {', '.join(unknown)}")
    return [view_table(load_table(name, recipes), runs) for name in sorted(claimed)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from announcing a trainer for every run."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
