"""Processes of tests."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

NOBODY = 65534


def end(process: subprocess.Popen | BaseProcess) -> None:
    """Kill a process and, if it leads a process group, the whole group; close its pipes."""
    if process.pid is None:  # never started
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    if isinstance(process, BaseProcess):
        process.join()
        return
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()


def fork(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a function in a fork of this process, because importing torch takes long.

    The fork collects no garbage of this process: FFmpeg's objects would wait for threads that it does not have.
    """
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, daemon=True)
    gc.freeze()
    process.start()
    return process


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as a user without privileges inside the context, since root can read and write everything."""
    user = os.geteuid()
    os.seteuid(NOBODY if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


def until(condition: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait until a condition is true, and fail after some time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {seconds:g} s"
        time.sleep(0.01)
