"""Processes that tests start, each of which ends with its test."""

import os
import signal
import subprocess
from contextlib import suppress
from multiprocessing.process import BaseProcess


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
