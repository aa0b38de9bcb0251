"""Progress of long-running work with the remaining time: a bar on a terminal, or else a line every ten seconds."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
def print_regularly(state: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Print the lines that `state` returns every ten seconds inside the context, from a separate thread."""

    def write() -> None:
        for line in state():
            print(line, flush=True)

    with _every(SECONDS, write):
        yield


@contextmanager
def shown(words: str | Callable[[], str], console: Console | None = None) -> Iterator[None]:
    """Show on stderr that work is in progress, whose description is `words`.

    On a terminal, it is a line that disappears at the end, and otherwise a line every ten seconds. Other output in the
    meantime must use `console`.
    """
    began = time.monotonic()

    def state() -> str:
        return f"{words() if callable(words) else words}, {clock(time.monotonic() - began)} so far"

    console = console or Console(stderr=True)
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


def _pace(task: Task) -> tuple[float | None, float | None]:
    """Return the average number of items per second since the task began, and the remaining seconds, once known.

    Rich's own speed covers the last items only, but items finish in batches.
    """
    elapsed = task.finished_time if task.finished_time is not None else task.elapsed
    done = task.completed - task.fields["before"]
    if not elapsed or done <= 0 or task.total is None:
        return None, None
    return done / elapsed, (task.total - task.completed) * elapsed / done


class _PaceColumn(ProgressColumn):
    """Column with the speed and the remaining time."""

    @override
    def render(self, task: Task) -> Text:
        speed, left = _pace(task)
        if speed is None or left is None:
            return Text("")
        return Text(f"{speed:.1f}/s" + ("" if task.finished else f", {clock(left)} left"))


class _Bar(Progress):
    """Rich progress whose tasks record the number of items that were already done at the start."""

    @override
    def add_task(self, description: str, **options: Any) -> TaskID:  # type: ignore[override]
        return super().add_task(description, before=options.get("completed", 0), **options)


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Progress]:
    """Show a bar for tasks of counted items, or print their state every ten seconds; nothing unless `shown`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _PaceColumn())

    def lines() -> Iterator[str]:
        for task in bar.tasks:
            if not task.finished:
                pace = _PaceColumn().render(task).plain
                yield f"{task.description}: {task.completed:.0f}/{task.total:.0f}" + (f", {pace}" if pace else "")

    bar = _Bar(*columns, disable=not shown)
    with bar, print_regularly(lines) if shown and not bar.console.is_terminal else nullcontext():
        yield bar


@contextmanager
def progress_file(file: Path, tasks: int = 1, seconds: float = 2.0) -> Iterator[Progress]:
    """Write the state of tasks to a file for another process, regularly and at the end.

    Args:
        file: JSON file with `doing`, and `left` in seconds if known.
        tasks: Number of consecutive tasks; the remaining time is known from the last one on.
        seconds: Time between two writes.
    """

    def write() -> None:
        if bar.tasks:
            task = bar.tasks[-1]
            left = _pace(task)[1] if len(bar.tasks) == tasks else None
            write_state(file, f"{task.description}, {task.completed:.0f} of {task.total:.0f}", left)

    with _Bar(disable=True) as bar:
        with _every(seconds, write):
            yield bar
        write()


def write_state(file: Path, doing: str, left: float | None) -> None:
    """Atomically write what a process is doing and the remaining seconds to a JSON file for another process."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"doing": doing, "left": left}), encoding="utf-8")
    draft.replace(file)
