"""Commands in separate processes, forked from a server that has imported the package once."""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

from child_processes import end

from tvr_lightning.media.workers import start_method


def tvr(words, folder, timeout=300, devices=1, program=None):
    """Run a command as a terminal would, or on several devices as a launcher such as torchrun does.

    `program` is a Python file to run instead of `tvr`. Of several processes, the output and status of a failed one
    are returned, or of the first.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"NODE_RANK": "0", "WORLD_SIZE": str(devices), "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    processes = []
    try:
        for rank in range(devices):
            more = {**group, "LOCAL_RANK": str(rank)} if devices > 1 else {}
            processes.append(started(words, folder, rank, more, program))
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            end(process)
    rank = next((rank for rank, process in enumerate(processes) if process.exitcode), 0)
    texts = [(folder / f"{stream}-{rank}.txt").read_text(encoding="utf-8") for stream in ("out", "err")]
    return subprocess.CompletedProcess(["tvr", *words], processes[rank].exitcode, *texts)


def started(words, folder, rank=0, more=None, program=None):
    """Start a command with errors in err-0.txt; pass it to the fixture `ended`, which ends it after the test."""
    files = [str(folder / f"{stream}-{rank}.txt") for stream in ("out", "err")]
    arguments = (words, {**os.environ, **(more or {})}, *files, program)
    process = multiprocessing.get_context(start_method()).Process(target=_command, args=arguments)
    process.start()
    return process


def _command(words: list[str], environment: dict[str, str], out: str, err: str, program: Path | None) -> None:
    os.setsid()  # a separate process group, as from a terminal
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # and may block it
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [str(program or "tvr"), *words]
    if program is not None:
        runpy.run_path(str(program), run_name="__main__")
        return
    from tvr_lightning.cli import main

    sys.exit(main())
