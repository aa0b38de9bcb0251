"""Where the processes of runs are started: on this machine, or by SLURM."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from tvr_lightning.errors import UserError
from tvr_lightning.reproduce.runs.execute import run_task_logged

EngineName = Literal["local", "slurm"]
LOG = "log.txt"
JOB = "job.txt"  # the id of a SLURM job until its end is seen


class EngineError(UserError, ValueError):
    """An engine cannot be used, or its options conflict; the message says what to do."""


Job = Callable[[], int | None]
"""Says how a process that was started has ended: its exit status; None while it runs."""


class Engine(Protocol):
    """Starts the process that carries out a task.

    Attributes:
        at_once: how many may run at a time.
        poll_seconds: seconds between two looks at what runs.
        parent: process that a task dies with, or None where it goes on alone.
    """

    at_once: int
    poll_seconds: float
    parent: int | None

    def start(self, task: Path) -> Job:
        """Start what a task file says; its output goes to `log.txt` beside it."""


class ForkingEngine:
    """On this machine, one run after another, forked from a process that has imported everything once.

    For runs on the synthetic datasets, which last about as long as the imports. Such a run uses one device: Lightning
    would start further processes by repeating this one's command line, which is `tvr reproduce`.
    """

    at_once = 1
    poll_seconds = 0.05

    def __init__(self) -> None:
        self.parent: int | None = os.getpid()
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._context.set_forkserver_preload(["tvr_lightning.reproduce.runs.execute"])

    def start(self, task: Path) -> Job:
        """Start what a task file says."""
        task.with_name(LOG).write_text("", encoding="utf-8")
        # Not daemonic: daemons may not start the processes that decode videos.
        process = self._context.Process(target=_forked, args=(task, task.with_name(LOG)))
        process.start()
        return lambda: process.exitcode


def _forked(task: Path, log: Path) -> None:
    sys.exit(run_task_logged(task, log))


class CommandEngine:
    """On this machine, one run after another, each with a command line of its own, which Lightning may repeat."""

    at_once = 1
    poll_seconds = 0.2

    def __init__(self) -> None:
        self.parent: int | None = os.getpid()

    def start(self, task: Path) -> Job:
        """Start what a task file says."""
        command = [sys.executable, "-m", "tvr_lightning.reproduce.runs.execute", str(task)]
        with task.with_name(LOG).open("w", encoding="utf-8") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).poll


@dataclass(frozen=True)
class SlurmOptions:
    """What every job asks SLURM for.

    Attributes:
        partition: to submit to; the cluster's default where None.
        minutes: longest time of a run.
        gpus: of a run; as many processes are started, so it must be the recipe's number of devices.
        memory_gib: main memory of a run.
        max_parallel_jobs: maximum number of jobs in the queue.
    """

    partition: str | None = None
    minutes: int = 1440
    gpus: int = 1
    memory_gib: int = 64
    max_parallel_jobs: int = 16

    def __post_init__(self) -> None:
        for name, least in (("minutes", 1), ("gpus", 0), ("memory_gib", 1), ("max_parallel_jobs", 1)):
            if getattr(self, name) < least:
                raise EngineError(f"--{name} is {getattr(self, name)}; it must be at least {least}")


class SlurmEngine:
    """SLURM through submitit: jobs outlive this process, and a later invocation waits for those that still run.

    Args:
        options: what jobs ask for.
        folder: for submitit's own files, seen by every node.
        cluster: submitit's name; `local` starts processes on this machine, for tests.

    Raises:
        EngineError: submitit is not installed.
    """

    poll_seconds = 5.0
    parent: int | None = None

    def __init__(self, options: SlurmOptions, folder: Path, cluster: Literal["slurm", "local"] = "slurm") -> None:
        try:
            import submitit
        except ImportError as error:
            raise EngineError("--engine slurm needs submitit: pip install 'tvr-lightning[slurm]'") from error
        self.at_once = options.max_parallel_jobs
        self._folder = folder
        self._kind: Any = submitit.SlurmJob if cluster == "slurm" else submitit.LocalJob
        self._executor: Any = submitit.AutoExecutor(folder=folder, cluster=cluster)
        self._executor.update_parameters(
            name="tvr-reproduce",
            timeout_min=options.minutes,
            mem_gb=options.memory_gib,
            # One process per device, as Lightning expects it under SLURM.
            tasks_per_node=max(options.gpus, 1) if cluster == "slurm" else 1,
            gpus_per_node=options.gpus if cluster == "slurm" else 0,
            **({"slurm_partition": options.partition} if options.partition and cluster == "slurm" else {}),
        )

    def start(self, task: Path) -> Job:
        """Submit what a task file says, or find the job that an earlier invocation submitted and that still runs."""
        known = task.with_name(JOB)
        if known.is_file():
            job = self._kind(self._folder, known.read_text(encoding="utf-8").strip())
            if not job.done():
                return partial(_status, job, task)
        task.with_name(LOG).write_text("", encoding="utf-8")  # here, for the job's processes all write to it
        job = self._executor.submit(run_task_logged, task, task.with_name(LOG))
        known.write_text(job.job_id, encoding="utf-8")
        return partial(_status, job, task)


def _status(job: Any, task: Path) -> int | None:
    if not job.done():
        return None
    task.with_name(JOB).unlink(missing_ok=True)
    failure = job.exception()
    if failure is None:
        return int(job.results()[0])
    # Killed for time or memory, it could not say so itself.
    with task.with_name(LOG).open("a", encoding="utf-8") as log:
        log.write(f"{failure}\n")
    return 1
