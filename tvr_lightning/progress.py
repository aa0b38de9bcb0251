"""Progress of long-running work with the remaining time: a bar on a terminal, or else a line every ten seconds."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
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
"""Maximum time between two lines."""


@contextmanager
def _every(seconds: float, do: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly in a separate thread inside the context."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            do()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def said_regularly(state: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Print progress every ten seconds inside the context.

    Args:
        state: Function that returns the lines to print, called from a separate thread.
    """

    def say() -> None:
        for line in state():
            print(line, flush=True)

    with _every(SECONDS, say):
        yield


@contextmanager
def shown(words: str | Callable[[], str], console: Console | None = None) -> Iterator[None]:
    """Show that work without its own output is in progress.

    On a terminal, it is a line that disappears at the end. Otherwise, it is a line on stderr every ten seconds, so that
    other programs can read the stdout of a command.

    Args:
        words: Description of the work, or function that returns it.
        console: Console for other output in the meantime, if there is one.
    """
    began = time.monotonic()

    def state() -> str:
        return f"{words() if callable(words) else words}, {clock(time.monotonic() - began)} so far"

    if console is None:
        console = Console(stderr=True)
    if not console.is_terminal:
        with _every(SECONDS, lambda: print(state(), file=sys.stderr, flush=True)):
            yield
        return
    with console.status(escape(state())) as status, _every(1.0, lambda: status.update(escape(state()))):
        yield


def clock(seconds: float) -> str:
    """Return seconds as 0:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _speed(task: Task) -> float | None:
    """Return the average number of items per second since the task began, because items finish in batches."""
    elapsed = task.finished_time if task.finished_time is not None else task.elapsed
    done = task.completed - task.fields.get("before", 0)
    return done / elapsed if elapsed and done > 0 else None


class _Rate(ProgressColumn):
    """Column with the number of items per second, once it is known."""

    def render(self, task: Task) -> Text:
        speed = _speed(task)
        return Text(f"{speed:.1f}/s" if speed else "")


class _Left(ProgressColumn):
    """Column with the remaining time."""

    def render(self, task: Task) -> Text:
        speed = _speed(task)
        left = "-:--:--" if speed is None or task.total is None else clock((task.total - task.completed) / speed)
        return Text(left, style="progress.remaining")


class _Counted(Progress):
    """Rich progress whose tasks record the number of items that were already done at the start."""

    def add_task(
        self,
        description: str,
        start: bool = True,
        total: float | None = 100.0,
        completed: int = 0,
        visible: bool = True,
        **fields: Any,
    ) -> TaskID:
        """Add a task; items already completed do not affect the speed."""
        return super().add_task(description, start, total, completed, visible, before=completed, **fields)


class FileBar(_Counted):
    """Invisible progress bar that writes the state of its tasks to a file for another process.

    Args:
        file: JSON file with `doing`, and `left` in seconds if known; written atomically.
        tasks: Number of consecutive tasks; the remaining time is known from the last one on.
        seconds: Minimum time between two writes.
    """

    def __init__(self, file: Path, tasks: int = 1, seconds: float = 2.0) -> None:
        super().__init__(disable=True)
        self.file, self.expected, self.seconds, self._written = file, tasks, seconds, 0.0

    def add_task(self, *given: Any, **named: Any) -> TaskID:
        """Add a task and write the file."""
        made = super().add_task(*given, **named)
        self._written = 0.0
        self._write()
        return made

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task and write the file."""
        super().advance(task_id, advance)
        self._write()

    def _write(self) -> None:
        if time.monotonic() - self._written < self.seconds:
            return
        self._written = time.monotonic()
        task = self.tasks[-1]
        total, speed = task.total or 0, _speed(task)
        doing = f"{task.description}, {task.completed:.0f} of {total:.0f}"
        left = None if speed is None or len(self.tasks) < self.expected else (total - task.completed) / speed
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps({"doing": doing, "left": left}), encoding="utf-8")
        draft.replace(self.file)


class _Bar(_Counted):
    """Rich progress that also prints lines without a terminal, where Rich prints nothing until the end."""

    _saying: ExitStack | None = None

    def start(self) -> None:
        """Show the bar, or start printing progress."""
        super().start()
        if not self.disable and not self.console.is_terminal:
            self._saying = ExitStack()
            self._saying.enter_context(said_regularly(self._lines))

    def stop(self) -> None:
        """Stop, and print the last state."""
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
    """Return a progress bar for tasks of counted items, which prints nothing unless `shown`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    return _Bar(*columns, _Left(), disable=not shown)
