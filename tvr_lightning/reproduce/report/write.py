"""A folder of pages about runs, with tables as Markdown, CSV, and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tvr_lightning.errors import UserError
from tvr_lightning.progress import shown
from tvr_lightning.reproduce.profile.costs import read_profiles
from tvr_lightning.reproduce.report.drawing import FAILURES, Arrays, shortened
from tvr_lightning.reproduce.report.figures.figure_types import figures_of
from tvr_lightning.reproduce.report.site import Site
from tvr_lightning.reproduce.report.sources import ReportedRun, read_runs
from tvr_lightning.reproduce.report.table_view import TableView, view_table
from tvr_lightning.reproduce.tables import known_tables, load_table


def write_report(directory: Path, recipes: Path, tables_only: bool) -> list[Path]:
    """Write the pages of all runs in a folder of `tvr reproduce` or `tvr fit`, and return their paths."""
    console = Console(highlight=False, soft_wrap=True)
    runs = read_runs(directory)
    arrays: dict[str, Arrays] = {}
    missing: dict[str, str] = {}
    with shown(lambda: f"report: {len(arrays) + len(missing)} of {len(runs)} runs done", console):
        views = views_of(runs, recipes)
        for place, run in enumerate(runs, start=1):
            try:
                if not run.finished or run.card.features is not None:
                    raise UserError("the run only stored features" if run.finished else "the run failed")
                if not tables_only:
                    console.print(f"[{place}/{len(runs)}] figures of {run.card.name}", markup=False)
                    arrays[run.key] = figures_of(run, directory / "figures")
            except FAILURES as error:  # the page states it; other runs keep their figures
                missing[run.key] = shortened(error)
                console.print(f"No figures of {run.card.name}: {missing[run.key]}", markup=False)
    with shown("report: comparing the runs and writing the pages", console):
        profiles = read_profiles(directory / "profiles")
        return Site(directory / "report", views, runs, arrays, missing, profiles).write()


def views_of(runs: Sequence[ReportedRun], recipes: Path) -> list[TableView]:
    """Return every table that the runs stand for rows of, sorted by name; raise UserError if its recipe is missing."""
    claimed = {claim.partition("/")[0] for run in runs for claim in run.claims}
    if unknown := sorted(claimed - set(known_tables(recipes))):
        raise UserError(f"The cards belong to tables that are missing in {recipes / 'tables'}: {', '.join(unknown)}")
    return [view_table(load_table(name, recipes), runs) for name in sorted(claimed)]
