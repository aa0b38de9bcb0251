"""Worker processes: how they start, end with the parent process, and return their errors."""

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
    """Error that a worker returns instead of an item or a batch."""

    error: UserError


def worker_died(error: RuntimeError) -> UserError | None:
    """Return the UserError for a DataLoader error, or None if no worker died."""
    if not str(error).startswith("DataLoader worker"):
        return None
    return UserError(
        f"{error}. Unless it was killed, memory ran out. Use fewer workers (data.init_args.num_workers, --num_workers) "
        "or smaller batches, or increase shared memory (docker: --shm-size)."
    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C while workers are started, since a DataLoader cannot stop half of its workers in order."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    # The workers' server inherits the mask when it starts. The mask applies only to this thread: another thread may
    # receive the signal, for which Python would interrupt this one, so the handler waits as well. Python 3.11 unblocks
    # the signal when it starts its resource tracker, which it does before the server.
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
    """Return the context for workers: forked from a clean server, since workers forked here occasionally hang."""
    if start_method() == "spawn":
        return _SpawnContext()
    return _ForkServerContext()


def start_method() -> str:
    """Return multiprocessing's name of the start method, and preload the package in the server of the workers."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    package = __name__.partition(".")[0]
    loaded = [name for name in sys.modules if name.partition(".")[0] == package]
    multiprocessing.get_context("forkserver").set_forkserver_preload(loaded)
    return "forkserver"


def _end_with_parent() -> None:
    """End this process as soon as its parent is gone.

    Workers wait for tasks on pipes whose other end they also hold open, and their parent by process ID is the server,
    which lives as long as they do. Therefore nothing else would notify them.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also interrupts the parent, which ends its workers
    sys.excepthook = _without_lost_connections

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def _without_lost_connections(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error, unless it only reports that the interrupted parent no longer receives tensors."""
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
