"""Worker processes: how they start, end with the parent process, and return their errors."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from types import TracebackType
from typing import Any

from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.files import delayed_interrupt


def batches_of(start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Start the workers of a DataLoader, yield its batches, and raise the UserErrors among them or if a worker died.

    Workers return errors, since a DataLoader would replace a raised one with another that contains its traceback.
    """
    with undisturbed():
        batches = start()
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch
    except (RuntimeError, ConnectionError, EOFError) as error:
        # A worker that has just died may have announced a batch whose tensors can no longer be received.
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
            raise
        dead = error if isinstance(error, RuntimeError) else "A DataLoader worker exited unexpectedly"
        raise UserError(
            f"{dead}. Unless it was killed, memory ran out. Use fewer workers (data.init_args.num_workers, "
            "--num_workers) or smaller batches, or increase shared memory (docker: --shm-size)."
        ) from error


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C while workers are started, since a DataLoader cannot stop half of its workers in order."""
    # The workers' server inherits the mask when it starts. Python 3.11 unblocks the signal when it starts its resource
    # tracker, which it does before the server.
    resource_tracker.ensure_running()
    with delayed_interrupt():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_method() -> str:
    """Return multiprocessing's name of the start method, and preload the package in the server of the workers."""
    # Workers are forked from a clean server, since workers forked from this process occasionally hang.
    loaded = [name for name in sys.modules if name.partition(".")[0] == "tvr_lightning"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(loaded)
    return "forkserver"


def worker_context() -> BaseContext:
    """Return the context for workers that end with this process."""
    start_method()
    return _WorkerContext()


class _Worker(ForkServerProcess):
    """Process that ends as soon as its parent is gone.

    Workers wait for tasks on pipes whose other end they also hold open, and their parent by process ID is the server,
    which lives as long as they do. Therefore nothing else would notify them.
    """

    @override
    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also interrupts the parent, which ends its workers
        sys.excepthook = _without_lost_connections
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


class _WorkerContext(ForkServerContext):
    Process = _Worker


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _without_lost_connections(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error, unless it only reports that the interrupted parent no longer receives tensors."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
