"""The bar that long work shows: how many of how many, how fast, how long it took and how long it will."""

from __future__ import annotations

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rate(ProgressColumn):
    """Items a second, once there are enough to tell."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f}/s" if speed else "")


def progress_bar(shown: bool = True) -> Progress:
    """Return a bar for tasks of counted items; not `shown`, it says nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), disable=not shown)
