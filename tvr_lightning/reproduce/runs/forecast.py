"""How long the runs of a plan will take: before the first one, between them, and while one is under way."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tvr_lightning.reproduce.runs.card import Card
from tvr_lightning.reproduce.runs.plan import Plan, PlannedRun

PROGRESS = "progress.json"
"""Of a run that is under way, in its folder."""
MEASURED_VIDEOS = 500
MEASURED = {("fit", False): 371.0, ("fit", True): 41.0, ("test", False): 11.0, ("test", True): 11.0}
"""Seconds on that many synthetic videos, by verb and by whether the encoder is trained already: medians of
benchmarks/results/table1-fixture.md, of two cores of an x86-64 machine."""


def open_runs(plan: Plan, cards: dict[str, Card]) -> list[PlannedRun]:
    """Return the planned runs that no card calls finished, in order.

    Args:
        plan: the runs.
        cards: by key.
    """
    return [run for run in plan.runs.values() if state_of(run, cards) != "finished"]


def state_of(run: PlannedRun, cards: dict[str, Card]) -> str:
    """Return `finished`, `failed` or `open`."""
    return cards[run.key].status if run.key in cards else "open"


def estimate(run: PlannedRun, cards: dict[str, Card]) -> float | None:
    """Return the seconds that a run may take: the median of finished runs of its dataset, else of all.

    Before any has finished, a run on synthetic videos is judged by what was measured elsewhere; None on real ones.

    Args:
        run: to be made.
        cards: of the same folder, real and synthetic runs never mixed.
    """
    alike = _alike(run, cards)
    same = [card for card in alike if card.run["dataset"] == run.dataset] or alike
    if same:
        return median(card.seconds for card in same if card.seconds)
    measured = MEASURED.get((run.verb, run.encoder_from is not None))
    return None if run.fixture_videos is None or measured is None else measured * run.fixture_videos / MEASURED_VIDEOS


def _alike(run: PlannedRun, cards: dict[str, Card]) -> list[Card]:
    return [
        card
        for card in cards.values()
        if card.seconds
        and card.status == "finished"
        and (card.run["fixture_videos"] is None) == (run.fixture_videos is None)
        and card.run["verb"] == run.verb
        and (card.run["encoder_from"] is None) == (run.encoder_from is None)
    ]


def time_left(todo: Sequence[PlannedRun], cards: dict[str, Card], at_once: int = 1) -> str:
    """Say how long the runs to make may take, from how long finished ones took.

    Args:
        todo: the runs.
        cards: by key.
        at_once: how many of them are made at a time.
    """
    if not todo:
        return "nothing left to run"
    left = f"{len(todo)} {'run' if len(todo) == 1 else 'runs'} left"
    seconds = [estimate(run, cards) for run in todo]
    known = [value for value in seconds if value is not None]
    if not known:
        options = " ".join(f"--config {path}" for path in todo[0].configs)
        return f"{left}; the first one shows the duration, or estimate it with tvr fit {options} --estimate"
    elsewhere = "" if any(_alike(run, cards) for run in todo) else " on two cores, estimated from other measurements"
    total = sum(known) * len(seconds) / len(known) / min(at_once, len(seconds))
    return f"{left}, about {duration(total)}{elsewhere}"


def beat(
    running: Sequence[tuple[PlannedRun, Any, float]],
    waiting: Sequence[PlannedRun],
    runs: Path,
    cards: dict[str, Card],
    at_once: int,
) -> str:
    """Say how far the runs are that are under way, and how long all of them still take.

    Args:
        running: runs with when they began, in seconds since 1970; at least one.
        waiting: the others.
        runs: folder of the runs' folders.
        cards: by key.
        at_once: how many are made at a time.
    """
    said, left, whole = [], [], []
    for run, _, began in running:
        elapsed = time.time() - began
        doing, told = _progress(runs / run.key)
        expected = estimate(run, cards)
        remains = told if told is not None else None if expected is None else max(expected - elapsed, 0.0)
        ends = "" if told is None else f", {duration(told)} left"
        said.append(f"{run.name}: {doing or 'starting'}, {duration(elapsed)} so far{ends}")
        if remains is not None:
            left.append(remains)
            whole.append(elapsed + remains)
    if len(left) < len(running):
        return "; ".join(said)
    # What nothing else tells of the others, those that are under way do.
    others = [estimate(run, cards) or median(whole) for run in waiting]
    total = (sum(left) + sum(others)) / min(at_once, len(left) + len(others))
    count = f"{len(waiting)} more {'run' if len(waiting) == 1 else 'runs'}, " if waiting else ""
    return f"{'; '.join(said)}; {count}about {duration(total)} left in total"


def _progress(folder: Path) -> tuple[str | None, float | None]:
    try:
        found = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nothing yet
        return None, None
    return found["doing"], found["left"]


def duration(seconds: float) -> str:
    """Return seconds as words."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
