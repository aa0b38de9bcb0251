"""How worker processes start, and that none outlives the process it works for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import context
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess


def worker_context() -> BaseContext:
    """Return how worker processes start: forked from a clean server process that has imported the package once.

    Workers forked from this process hang now and then when it has decoded videos itself. They end when this process
    does, also when it is killed.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return _SpawnContext()
    server = _ForkServerContext()
    package = __name__.partition(".")[0]
    server.set_forkserver_preload([name for name in sys.modules if name.partition(".")[0] == package])
    return server


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone.

    Workers wait for work on pipes whose other end they hold themselves, and their parent by process number is the
    server, which lives as long as they do: nothing else would tell them.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard interrupts the parent as well, and it ends its workers

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


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
