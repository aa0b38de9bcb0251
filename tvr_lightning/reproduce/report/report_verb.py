"""`tvr report`: the cards of a folder as markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console

from tvr_lightning.files import write_whole
from tvr_lightning.media.workers import worker_context
from tvr_lightning.places import Place
from tvr_lightning.progress import shown
from tvr_lightning.recipe_files import recipes_folder
from tvr_lightning.reproduce.profile.card import read_profiles
from tvr_lightning.reproduce.report.cells import TableView
from tvr_lightning.reproduce.report.contests import contests_of
from tvr_lightning.reproduce.report.figures.between import Pair, draw_between, pairs_of
from tvr_lightning.reproduce.report.figures.curves import draw_curves, draw_overlaid, measure_curves
from tvr_lightning.reproduce.report.figures.drawing import FAILURES, not_drawn, shortened
from tvr_lightning.reproduce.report.figures.kinds import draw, figures_of
from tvr_lightning.reproduce.report.folder import read_folder, views_of
from tvr_lightning.reproduce.report.formats import write_tables
from tvr_lightning.reproduce.report.page import RunSection, page
from tvr_lightning.reproduce.runs.card import Card
from tvr_lightning.reproduce.runs.runner import Folders

Cards = Annotated[Path, Place("folder", "create one with tvr reproduce TABLE --out {path}")]
MANY_RUNS, MOST_PROCESSES = 8, 4
"""From how many runs on further processes save more time than they take to start, and how many share the memory."""


def run_report(directory: Cards, recipes: Path = Path("recipes"), tables_only: bool = False) -> int:
    """Write the results of `tvr reproduce` to report.md, report.csv, report.tex, and one page, report.html.

    The figures are drawn from each run's own weights and test split: one pass, kept in figures/ beside the cards.

    Args:
        directory: folder that `tvr reproduce --out` wrote.
        recipes: folder of the recipes, whose tables map runs to published rows.
        tables_only: omit the figures, which need weights and videos.
    """
    console = Console(highlight=False, soft_wrap=True)
    cards = read_folder(directory)
    order = sorted(cards.values(), key=lambda card: (card.name, card.run["seed"] or 0))
    sections: list[RunSection] = []
    with shown(lambda: _how_far(len(sections), len(order)), console), _sections(order, directory, tables_only) as made:
        views = views_of(cards, directory, recipes_folder(recipes))
        for place, section in enumerate(made, start=1):
            sections.append(section)
            if not tables_only:
                console.print(f"[{place}/{len(cards)}] figures of {section.card.name}", markup=False)
            if section.missing:
                console.print(f"No figures of {section.card.name}: {section.missing}", markup=False)
    pairs = [pair for view in views for pair in pairs_of(view)]
    with shown("report: comparing the runs and writing the page", console):
        written = write_report(views, sections, directory, pairs)
    for path in written:
        console.print(f"Wrote {path}", markup=False)
    return 0


def _how_far(done: int, runs: int) -> str:
    return f"report: {done} of {runs} runs done"


@contextmanager
def _sections(cards: Sequence[Card], directory: Path, tables_only: bool) -> Iterator[Iterator[RunSection]]:
    """Make the runs' sections in order; many runs share several processes where there is no GPU that all would use."""
    make = partial(section_of, directory=directory, tables_only=tables_only)
    processes = min(os.cpu_count() or 1, MOST_PROCESSES)
    if tables_only or len(cards) < MANY_RUNS or processes < 2 or torch.cuda.is_available():
        yield map(make, cards)
        return
    threads = max(1, (os.cpu_count() or 1) // processes)
    own = torch.get_num_threads()
    torch.set_num_threads(threads)  # more threads than cores wait for each other without sleeping
    try:
        with ProcessPoolExecutor(processes, worker_context(), torch.set_num_threads, (threads,)) as pool:
            yield pool.map(make, cards)
    finally:
        torch.set_num_threads(own)


def section_of(card: Card, directory: Path, tables_only: bool = False) -> RunSection:
    """Return what the page says of a run.

    Args:
        card: of the run.
        directory: of the report; figures are kept below it.
        tables_only: without figures.
    """
    section = RunSection(card)
    if card.status == "failed":
        section.missing = "the run failed"
        return section
    if card.features is not None:
        section.missing = "the run only stored features"
        return section
    if tables_only:
        section.curves = measure_curves(card)
        section.charts = draw_curves(section.curves, card.key, kept=False)
        return section
    try:
        with _quiet():
            section.arrays = figures_of(card, directory / "figures")
    except FAILURES as error:  # the page says so; other runs keep theirs
        section.missing = shortened(error)
        section.curves = measure_curves(card)
        section.charts = draw_curves(section.curves, card.key, kept=False)
    else:
        section.curves = section.arrays
        section.charts = draw(section.arrays, card.key) + draw_curves(section.arrays, card.key, kept=True)
    return section


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


def write_report(
    views: list[TableView], sections: list[RunSection], directory: Path, pairs: Sequence[Pair] = ()
) -> list[Path]:
    """Write the report in all four formats; return the files.

    Args:
        views: tables.
        sections: what the page says of each run.
        directory: where report.md, report.csv, report.tex and report.html go.
        pairs: of methods and baselines to compare.
    """
    drawn = [(section.card, section.arrays) for section in sections if section.arrays]
    try:
        between = draw_overlaid([(section.card, section.curves) for section in sections]) + draw_between(drawn, pairs)
    except FAILURES as error:
        between = [not_drawn("Comparisons", shortened(error))]
    path = directory / "report.html"
    contests = contests_of(drawn, Folders(directory).cards)
    write_whole(path, page(views, sections, between, read_profiles(directory / "profiles"), contests).encode())
    return [*write_tables(views, directory / "report"), path]
