"""`tvr report`: the cards of a folder as markdown, CSV, LaTeX and one HTML page."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from threadpoolctl import threadpool_limits

from tvr_lightning.media.workers import worker_context
from tvr_lightning.reproduce.profile.card import read_profiles
from tvr_lightning.reproduce.report.cells import TableView
from tvr_lightning.reproduce.report.figures.between import Pair, draw_between, pairs_of
from tvr_lightning.reproduce.report.figures.curves import draw_curves, measure_curves
from tvr_lightning.reproduce.report.figures.drawing import FAILURES, not_drawn, shortened
from tvr_lightning.reproduce.report.figures.kinds import draw, figures_of
from tvr_lightning.reproduce.report.folder import read_folder, views_of
from tvr_lightning.reproduce.report.formats import comma_separated, latex, markdown
from tvr_lightning.reproduce.report.page import RunPart, page
from tvr_lightning.reproduce.runs.card import Card

MANY_RUNS, MOST_PROCESSES = 8, 4
"""From how many runs on further processes save more time than they take to start, and how many share the memory."""


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
    order = sorted(cards.values(), key=lambda card: (card.name, card.run["seed"] or 0))
    with _parts(order, directory, tables_only) as made:
        views = views_of(cards, directory, recipes)
        parts = []
        for place, part in enumerate(made, start=1):
            parts.append(part)
            if not tables_only:
                console.print(f"[{place}/{len(cards)}] figures of {part.card.name}", markup=False)
            if part.missing:
                console.print(f"No figures of {part.card.name}: {part.missing}", markup=False)
    pairs = [pair for view in views for pair in pairs_of(view)]
    for path in write_report(views, parts, directory, pairs):
        console.print(f"Wrote {path}", markup=False)
    return 0


@contextmanager
def _parts(cards: Sequence[Card], directory: Path, tables_only: bool) -> Iterator[Iterator[RunPart]]:
    """Make the runs' parts in order, in several processes where there are many runs and no GPU that all would share."""
    make = partial(part_of, directory=directory, tables_only=tables_only)
    processes = min(os.cpu_count() or 1, MOST_PROCESSES)
    if tables_only or len(cards) < MANY_RUNS or processes < 2 or torch.cuda.is_available():
        yield map(make, cards)
        return
    threads = max(1, (os.cpu_count() or 1) // processes)
    own = torch.get_num_threads()
    torch.set_num_threads(threads)  # more threads than cores wait for each other without sleeping
    try:
        with ProcessPoolExecutor(processes, worker_context(), _limit_threads, (threads,)) as pool:
            yield pool.map(make, cards)
    finally:
        torch.set_num_threads(own)


def _limit_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    threadpool_limits(threads)  # t-SNE's


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
    if tables_only:
        part.charts = draw_curves(measure_curves(card), card.key, kept=False)
        return part
    try:
        with _quiet():
            part.arrays = figures_of(card, directory / "figures")
    except FAILURES as error:  # the page says so; other runs keep theirs
        part.missing = shortened(error)
        part.charts = draw_curves(measure_curves(card), card.key, kept=False)
    else:
        part.charts = draw_curves(part.arrays, card.key, kept=True) + draw(part.arrays, card.key)
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


def write_report(
    views: list[TableView], parts: list[RunPart], directory: Path, pairs: Sequence[Pair] = ()
) -> list[Path]:
    """Write the report in all four formats; return the files.

    Args:
        views: tables.
        parts: runs.
        directory: where report.md, report.csv, report.tex and report.html go.
        pairs: of methods and baselines to compare.
    """
    try:
        general = draw_between([(part.card, part.arrays) for part in parts if part.arrays], pairs)
    except FAILURES as error:
        general = [not_drawn("Comparisons", shortened(error))]
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
