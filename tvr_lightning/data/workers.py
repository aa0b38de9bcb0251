"""How worker processes start."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import BaseContext


def worker_context() -> BaseContext:
    """Return how worker processes start: forked from a clean server process that has imported the package once.

    Workers forked from this process hang now and then when it has decoded videos itself.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    package = __name__.partition(".")[0]
    context.set_forkserver_preload([name for name in sys.modules if name.partition(".")[0] == package])
    return context
