"""How worker processes start, that none outlives the process it works for, and how their errors come back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import context, resource_tracker
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from types import TracebackType

from tvr_lightning.errors import UserError


@dataclass
class Failure:
    """An error on its way from a worker, in the place of an item or a batch."""

    error: UserError


def worker_died(error: RuntimeError) -> UserError | None:
    """Return what is to be raised for an error of a DataLoader, or None where no worker died."""
    if not str(error).startswith("DataLoader worker"):
        return None
    return UserError(
        f"{error}. Unless it was killed, memory ran out. Use fewer workers (data.init_args.num_workers, --num_workers) "
        "or smaller batches, or increase shared memory (docker: --shm-size)."
    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold Ctrl-C back while workers are started, since half of a DataLoader's workers cannot be ended in order."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    # The mask is what the workers' server inherits as it starts. It is this thread's alone: any other thread may take
    # the signal in its place, upon which Python would interrupt this one, so that the handler waits as well.
    # Python 3.11 lets the signal through as soon as it has started its tracker, which it does before the server.
    resource_tracker.ensure_running()
    pressed: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def worker_context() -> BaseContext:
    """Return how worker processes start: forked from a clean server process that has imported the package once.

    Workers forked from this process hang now and then when it has decoded videos itself. They end when this process
    does, also when it is killed.
    """
    if start_method() == "spawn":
        return _SpawnContext()
    return _ForkServerContext()


def start_method() -> str:
    """Return multiprocessing's name for how worker processes start, and have their server import the package."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    package = __name__.partition(".")[0]
    loaded = [name for name in sys.modules if name.partition(".")[0] == package]
    multiprocessing.get_context("forkserver").set_forkserver_preload(loaded)
    return "forkserver"


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone.

    Workers wait for work on pipes whose other end they hold themselves, and their parent by process number is the
    server, which lives as long as they do: nothing else would tell them.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard interrupts the parent as well, and it ends its workers
    sys.excepthook = _without_lost_connections

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def _without_lost_connections(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error, unless it only says that the parent, interrupted, no longer takes the tensors offered to it."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


class _SpawnWorker(SpawnProcess):
    def run(self) -> None:
        _end_with_parent()
        super().run()


class _SpawnContext(SpawnContext):
    Process = _SpawnWorker


if sys.platform != "win32":

    class _ForkServerWorker(context.ForkServerProcess):
        def run(self) -> None:
            _end_with_parent()
            super().run()

    class _ForkServerContext(context.ForkServerContext):
        Process = _ForkServerWorker
