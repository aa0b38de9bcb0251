"""Engines that start the processes of runs: on this machine, or by SLURM."""

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tvr_lightning.errors import optional
from tvr_lightning.media.workers import worker_context
from tvr_lightning.reproduce.runs.execute import LOG, run_task

JOB = "job.txt"  # the ID of a SLURM job, until its end is seen
Job = Callable[[], int | None]  # that returns the exit status of a process, or None while it runs


class LocalEngine:
    """One run after another on this machine, each forked from a process that has imported everything once."""

    max_parallel, poll_seconds = 1, 0.05

    def start(self, task: Path) -> Job:
        """Start a process that ends with this one."""
        process: Any = worker_context().Process(target=_exit_with_status, args=(task,))  # type: ignore[attr-defined]
        process.start()
        atexit.register(process.terminate)  # at Ctrl+C, which the process ignores; training saves itself
        return lambda: process.exitcode


def _exit_with_status(task: Path) -> None:
    sys.exit(run_task(task))


class SlurmEngine:
    """SLURM jobs, which outlive this process; a later `tvr reproduce` waits for those that still run.

    All nodes must see `folder`, which is for submitit's files. Tests use the cluster `local`, this machine.
    """

    poll_seconds = 5.0

    def __init__(
        self, folder: Path, partition: str | None = None, minutes: int = 1440, gpus: int = 1, memory_gib: int = 64,
        max_parallel_jobs: int = 16, cluster: Literal["slurm", "local"] = "slurm",
    ) -> None:  # fmt: skip
        submitit = optional("submitit", "slurm", "--engine slurm")
        self.max_parallel = max_parallel_jobs
        self._folder = folder
        self._job: Any = submitit.SlurmJob if cluster == "slurm" else submitit.LocalJob
        self._executor: Any = submitit.AutoExecutor(folder=folder, cluster=cluster)
        self._executor.update_parameters(name="tvr-reproduce", timeout_min=minutes, mem_gb=memory_gib)
        if cluster == "slurm":  # with one process per device, as Lightning expects
            self._executor.update_parameters(tasks_per_node=max(gpus, 1), gpus_per_node=gpus)
            if partition is not None:
                self._executor.update_parameters(slurm_partition=partition)

    def start(self, task: Path) -> Job:
        """Submit a run, or find its job if it was submitted before and still runs."""
        known = task.with_name(JOB)
        job = self._job(self._folder, known.read_text(encoding="utf-8").strip()) if known.is_file() else None
        if job is None or job.done():
            job = self._executor.submit(run_task, task)
            known.write_text(job.job_id, encoding="utf-8")

        def status() -> int | None:
            if not job.done():
                return None
            known.unlink(missing_ok=True)
            failure = job.exception()
            if failure is None:
                return int(job.results()[0])
            with task.with_name(LOG).open("a", encoding="utf-8") as log:  # killed for time or memory
                log.write(f"{failure}\n")
            return 1

        return status


Engine = LocalEngine | SlurmEngine
