"""Run folder for results, configuration and checkpoints, independent of the logger."""

import csv
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from tvr_lightning.files import file_lock
from tvr_lightning.training.checkpoints import read_checkpoint

CONFIG, METRICS, LOCK = "config.yaml", "metrics.csv", ".lock"
"""Files in a run's folder: all options, the logged values, and a file that is locked while the run is active."""


class RunTrainer(Trainer):
    """Trainer whose `log_dir` is the run's folder, instead of the logger's, which may be shared by runs or not exist.

    The first process sets `run_folder`, and the others receive it from `log_dir`.
    """

    run_folder: Path | None = None
    callbacks: list[Callback]

    @property
    @override
    def log_dir(self) -> str | None:
        if self.run_folder is None:
            return super().log_dir
        # A collective operation, so all processes must read this property.
        return self.strategy.broadcast(str(self.run_folder))


def run_number(run: Path) -> int:
    """Return the number at the end of a run's folder, -1 if there is none."""
    number = run.name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def create_run(runs: Path) -> Path:
    """Create and return `runs`/version_<n>, with the number after all existing ones."""
    while True:
        runs.mkdir(parents=True, exist_ok=True)
        folder = runs / f"version_{max(map(run_number, runs.glob('version_*')), default=-1) + 1}"
        # Another run may have created this folder in the meantime, or have failed and removed `runs`.
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir()
            return folder


def locked_run(folder: Path) -> AbstractContextManager[None]:
    """Lock a run's folder within the context; raise UserError if another process has locked it."""
    return file_lock(folder / LOCK, f"the run {folder}")


@contextmanager
def new_run(runs: Path, trainer: Trainer) -> Iterator[Path]:
    """Create and lock the folder of a new run in `runs`; remove it if the run fails before its first step."""
    only = not runs.exists()
    folder = create_run(runs)
    try:
        with locked_run(folder):
            yield folder
    except BaseException:
        if trainer.global_step == 0:
            shutil.rmtree(folder, ignore_errors=True)
            if only:
                with suppress(OSError):  # if it contains another run by now
                    runs.rmdir()
        raise


def run_of(checkpoint: str | None) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, or None if it is not from a run or not writable."""
    folder = Path(checkpoint or "").parent
    own = folder.name == "checkpoints" and (folder.parent / CONFIG).is_file()
    return folder.parent if own and os.access(folder.parent, os.W_OK | os.X_OK) else None


def metrics_logger(folder: Path, resume_from: Path | None = None) -> CSVLogger:
    """Return the logger of `metrics.csv` in a run's folder, which keeps the rows of the steps before `resume_from`."""
    rows = []
    file = folder / METRICS
    if resume_from is not None and file.is_file():
        steps = read_checkpoint(resume_from)["global_step"]
        with file.open(newline="", encoding="utf-8") as content:
            complete = [row for row in csv.DictReader(content) if None not in row.values()]
        rows = [row for row in complete if int(row["step"]) < steps]
    logger = CSVLogger(folder.parent, name=None, version=folder.name, flush_logs_every_n_steps=1)
    for row in rows:
        logger.experiment.log_metrics({name: value for name, value in row.items() if value}, int(row["step"]))
    logger.save()
    return logger
