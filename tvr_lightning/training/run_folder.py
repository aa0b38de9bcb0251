"""The folder of a run: one for its results, configuration and checkpoints, whatever logger it has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch import Trainer

from tvr_lightning.errors import UserError
from tvr_lightning.files import held

LOCK = ".lock"
"""File in a run's folder that is locked while the run is alive; it stays there afterwards."""


class RunTrainer(Trainer):
    """A trainer whose `log_dir` is the run's folder.

    Lightning's own is the logger's: TensorBoard's has a folder for every run, W&B's `save_dir` is shared by all runs,
    and that of MLflow on a server is none.

    Attributes:
        run_folder: Folder that the first process has claimed; the others learn it from `log_dir`. None leaves it to the
            logger.
    """

    run_folder: Path | None = None

    @property
    def log_dir(self) -> str | None:
        """The run's folder; asks every process, so that none may have left."""
        if self.run_folder is None:
            return super().log_dir
        return self.strategy.broadcast(str(self.run_folder))


class RunInUseError(UserError, RuntimeError):
    """The folder of a run that another process still writes to."""

    exit_status = 2


def create_run(runs: Path) -> Path:
    """Create and return `runs`/version_<n>, numbered after all that are there.

    Args:
        runs: Folder of all runs of a method on a dataset, created if it does not exist.

    Raises:
        OSError: The folder cannot be created.
    """
    while True:
        runs.mkdir(parents=True, exist_ok=True)
        numbers = [path.name.removeprefix("version_") for path in runs.glob("version_*")]
        folder = runs / f"version_{max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1}"
        # Another run may have created this folder since, or have failed and removed its own together with `runs`.
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir()
            return folder


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Keep a run's folder locked while the context lasts, which shows other processes that the run is alive.

    Raises:
        RunInUseError: Another process holds the lock.
        OSError: The lock file cannot be created.
    """
    busy = RunInUseError(
        f"{folder} belongs to a run that is still active. Wait until it ends, or start another run without "
        "--checkpoints.resume"
    )
    with held(folder / LOCK, busy, "do not resume this run while it is active"):
        yield


@contextmanager
def new_run(runs: Path, trainer: Trainer) -> Iterator[Path]:
    """Create the folder of a new run and keep it locked; remove it if the run fails before its first step.

    Args:
        runs: Folder of all runs of a method on a dataset.
        trainer: Trainer that counts the steps.
    """
    only = not runs.exists()
    folder = create_run(runs)
    try:
        with locked_run(folder):
            yield folder
    except BaseException:
        if trainer.global_step == 0:
            shutil.rmtree(folder, ignore_errors=True)
            if only:
                with suppress(OSError):  # if another run is there by now
                    runs.rmdir()
        raise


def run_of(checkpoint: str | None) -> Path | None:
    """Return the folder of the run that wrote a checkpoint; None where it is no run's, or nothing can be written there.

    Args:
        checkpoint: as the command line names it.
    """
    place = Path(checkpoint or "")
    folder = place.parent.parent
    own = place.parent.name == "checkpoints" and (folder / "config.yaml").is_file()
    return folder if own and os.access(folder, os.W_OK | os.X_OK) else None
