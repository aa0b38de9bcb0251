"""What long work shows: a bar on a terminal, a line every ten seconds elsewhere, both with the time left."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

SECONDS = 10.0
"""The longest silence."""


@contextmanager
def said_regularly(state: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Say how far work is, every ten seconds while the context lasts.

    Args:
        state: the lines to say; called from a thread of its own.
    """
    done = threading.Event()

    def say() -> None:
        while not done.wait(SECONDS):
            for line in state():
                print(line, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def shown(words: str) -> Iterator[None]:
    """Show on a terminal that something goes on which says nothing itself, and leave no trace of it.

    Args:
        words: what goes on.
    """
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(words):
        yield


def clock(seconds: float) -> str:
    """Return seconds as 0:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _speed(task: Task) -> float | None:
    """Return items a second since the task began: what comes in bursts, batch by batch, is not judged by the last."""
    elapsed = task.finished_time if task.finished_time is not None else task.elapsed
    done = task.completed - task.fields.get("before", 0)
    return done / elapsed if elapsed and done > 0 else None


class _Rate(ProgressColumn):
    """Items a second, once there are enough to tell."""

    def render(self, task: Task) -> Text:
        speed = _speed(task)
        return Text(f"{speed:.1f}/s" if speed else "")


class _Left(ProgressColumn):
    """How long the rest takes."""

    def render(self, task: Task) -> Text:
        speed = _speed(task)
        left = "-:--:--" if speed is None or task.total is None else clock((task.total - task.completed) / speed)
        return Text(left, style="progress.remaining")


class _Bar(Progress):
    """Rich's, which by itself says nothing until the end where there is no terminal."""

    _saying: ExitStack | None = None

    def add_task(
        self,
        description: str,
        start: bool = True,
        total: float | None = 100.0,
        completed: int = 0,
        visible: bool = True,
        **fields: Any,
    ) -> TaskID:
        """Begin to count; what was done before, by an earlier call, says nothing of the speed."""
        return super().add_task(description, start, total, completed, visible, before=completed, **fields)

    def start(self) -> None:
        """Show the bar, or begin to say how far it is."""
        super().start()
        if not self.disable and not self.console.is_terminal:
            self._saying = ExitStack()
            self._saying.enter_context(said_regularly(self._lines))

    def stop(self) -> None:
        """End with the last state."""
        if self._saying is not None:
            self._saying.close()
            self._saying = None
        super().stop()

    def _lines(self) -> list[str]:
        lines = []
        for task in self.tasks:
            if task.finished or task.total is None:
                continue
            speed = _speed(task)
            told = "" if speed is None else f", {speed:.1f}/s, {clock((task.total - task.completed) / speed)} left"
            lines.append(f"{task.description}: {task.completed:.0f}/{task.total:.0f}{told}")
        return lines


def progress_bar(shown: bool = True) -> Progress:
    """Return a bar for tasks of counted items; not `shown`, it says nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    return _Bar(*columns, _Left(), disable=not shown)
