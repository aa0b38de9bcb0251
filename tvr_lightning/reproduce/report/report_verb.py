"""`tvr report`: the cards of a folder as markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.card import Card
from tvr_lightning.reproduce.profile_card import read_profiles
from tvr_lightning.reproduce.report.curves import draw_curves, read_curves
from tvr_lightning.reproduce.report.figures import draw, figures_of
from tvr_lightning.reproduce.report.folder import read_folder, views_of
from tvr_lightning.reproduce.report.page import RunPart, page
from tvr_lightning.reproduce.report.tcmgc import draw_between
from tvr_lightning.reproduce.view import TableView
from tvr_lightning.reproduce.write_tables import comma_separated, latex, markdown

ERROR_LENGTH = 300


def run_report(directory: Path, recipes: Path = Path("recipes"), tables_only: bool = False) -> int:
    """Write what `tvr reproduce` measured as report.md, report.csv, report.tex and one page, report.html.

    The figures are drawn from each run's own weights and test split: one pass, kept in figures/ beside the cards.

    Args:
        directory: the folder that `tvr reproduce --out` wrote.
        recipes: folder of the recipes, whose tables say which line a run stands for.
        tables_only: leave out figures, which need weights and videos.
    """
    console = Console(highlight=False, soft_wrap=True)
    cards = read_folder(directory)
    views = views_of(cards, directory, recipes)
    parts = []
    for place, card in enumerate(sorted(cards.values(), key=lambda card: (card.name, card.run["seed"] or 0)), start=1):
        if not tables_only:
            console.print(f"[{place}/{len(cards)}] figures of {card.name}", markup=False)
        parts.append(part_of(card, directory, tables_only))
        if parts[-1].missing:
            console.print(f"No figures of {card.name}: {parts[-1].missing}", markup=False)
    for path in write_report(views, parts, directory):
        console.print(f"Wrote {path}", markup=False)
    return 0


def part_of(card: Card, directory: Path, tables_only: bool = False) -> RunPart:
    """Return what the page says of a run.

    Args:
        card: of the run.
        directory: of the report; figures are kept below it.
        tables_only: without figures.
    """
    part = RunPart(card)
    if card.status == "failed":
        part.missing = "the run failed"
        return part
    part.charts = draw_curves(read_curves(card), card.key)
    if tables_only:
        return part
    try:
        with _quiet():
            part.arrays = figures_of(card, directory / "figures")
    except (UserError, ValueError, ArithmeticError, RuntimeError) as error:  # the page says so; other runs keep theirs
        part.missing = _short(str(error))
    else:
        part.charts += draw(part.arrays, card.key)
    return part


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from announcing a trainer, of which figures need one per run."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _short(text: str) -> str:
    return text if len(text) <= ERROR_LENGTH else text[:ERROR_LENGTH] + " ..."


def write_report(views: list[TableView], parts: list[RunPart], directory: Path) -> list[Path]:
    """Write the report in all four formats; return the files.

    Args:
        views: tables.
        parts: runs.
        directory: where report.md, report.csv, report.tex and report.html go.
    """
    drawn = {part.card.key: part for part in parts if part.arrays}
    general = draw_between(
        {key: part.arrays for key, part in drawn.items()}, {key: part.card.name for key, part in drawn.items()}
    )
    csv_parts = [comma_separated(view) for view in views]
    head = csv_parts[0].partition("\n")[0]
    written = []
    for name, text in (
        ("report.md", "\n".join(markdown(view) for view in views)),
        ("report.csv", "".join([head, "\n", *(part.partition("\n")[2] for part in csv_parts)])),
        ("report.tex", "\n".join(latex(view) for view in views)),
        ("report.html", page(views, parts, general, read_profiles(directory / "profiles"))),
    ):
        path = directory / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
