"""Looks at many video files at once, in worker processes, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tvr_lightning.media.workers import worker_context

T = TypeVar("T")
R = TypeVar("R")
CHUNK = 8  # files handed to a worker at a time


def survey(look: Callable[[T], R], items: Sequence[T], *, workers: int, title: str, progress: bool = True) -> list[R]:
    """Return `look(item)` for every item, in order.

    Args:
        look: a function that worker processes can import.
        items: what it is called with.
        workers: processes; 1 looks in this one.
        title: of the progress bar.
        progress: whether the bar is shown.

    Raises:
        ValueError: fewer than one worker.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; give at least 1")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results: list[R] = []
    with Progress(*columns, disable=not progress) as bar:
        task = bar.add_task(title, total=len(items))
        if workers == 1 or len(items) <= CHUNK:
            for item in items:
                results.append(look(item))
                bar.advance(task)
            return results
        with ProcessPoolExecutor(workers, mp_context=worker_context()) as pool:
            for result in pool.map(look, items, chunksize=CHUNK):
                results.append(result)
                bar.advance(task)
    return results
