"""Progress of long-running work with the remaining time: a bar on a terminal, or else a line every ten seconds."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from typing_extensions import override

SECONDS = 10.0
"""Time between two lines."""


@contextmanager
def _every(seconds: float, do: Callable[[], None]) -> Iterator[None]:
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
def shown(words: str | Callable[[], str], console: Console | None = None) -> Iterator[None]:
    """Show `words` on stderr (on a terminal as a line that disappears); other output must use `console`."""
    began = time.monotonic()

    def state() -> str:
        return f"{words() if callable(words) else words}, {clock(time.monotonic() - began)} so far"

    console = console or Console(stderr=True)
    if console.is_terminal:
        with console.status(escape(state())) as status, _every(1.0, lambda: status.update(escape(state()))):
            yield
    else:
        with _every(SECONDS, lambda: print(state(), file=sys.stderr, flush=True)):
            yield


def clock(seconds: float) -> str:
    """Return seconds as 0:00:00."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


class _Progress(Progress):
    @override
    def add_task(self, *arguments: Any, **named: Any) -> TaskID:
        return super().add_task(*arguments, before=named.get("completed", 0), **named)


def _speed(task: Task) -> float:
    """Return the items per second since the task was added, 0 before the first item."""
    return float(task.completed - task.fields["before"]) / (task.finished_time or task.elapsed or math.inf)


class _PaceColumn(ProgressColumn):
    @override
    def render(self, task: Task) -> Text:
        speed = _speed(task)
        if not speed or task.remaining is None:
            return Text()
        return Text(f"{speed:.1f}/s" if task.finished else f"{speed:.1f}/s, {clock(task.remaining / speed)} left")


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Show a bar for tasks of counted items, or print their state every ten seconds; nothing unless `shown`."""
    pace = _PaceColumn()

    def write() -> None:
        for task in bar.tasks:
            if task.total and not task.finished:
                done = f"{task.description}: {task.completed:.0f}/{task.total:.0f}"
                print(f"{done}, {pace.render(task)}".removesuffix(", "), flush=True)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), pace)
    bar = _Progress(*columns, disable=not shown)
    with bar, _every(SECONDS, write) if shown and not bar.console.is_terminal else nullcontext():
        yield bar


@contextmanager
def progress_file(file: Path, tasks: int = 1, seconds: float = 2.0) -> Iterator[Progress]:
    """Write the state of consecutive `tasks` to a JSON file; the remaining time is known during the last one."""

    def write() -> None:
        if bar.tasks:
            task = bar.tasks[-1]
            speed = _speed(task)
            left = (task.remaining or 0.0) / speed if speed and len(bar.tasks) == tasks else None
            write_state(file, f"{task.description}, {task.completed:.0f} of {task.total:.0f}", left)

    with _Progress(disable=True) as bar:
        with _every(seconds, write):
            yield bar
        write()


def write_state(file: Path, doing: str, left: float | None) -> None:
    """Atomically write what a process is doing and the remaining seconds to a JSON file for another process."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"doing": doing, "left": left}), encoding="utf-8")
    draft.replace(file)
