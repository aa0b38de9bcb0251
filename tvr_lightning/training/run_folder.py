"""The folder of a run: one for its results, configuration and checkpoints, whatever logger it has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch import Trainer


class RunTrainer(Trainer):
    """A trainer whose `log_dir` is the run's folder.

    Lightning's own is the logger's: TensorBoard's has a folder for every run, W&B's `save_dir` is shared by all runs,
    and that of MLflow on a server is none.

    Attributes:
        run_folder: of this process; all processes take that of the first. None leaves it to the logger.
    """

    run_folder: Path | None = None

    @property
    def log_dir(self) -> str | None:
        """The run's folder; asks every process, so that none may have left."""
        if self.run_folder is None:
            return super().log_dir
        return self.strategy.broadcast(str(self.run_folder))


def next_run(folder: Path) -> Path:
    """Return `folder`/version_<n> with the first number above those that are there; it is not made.

    Args:
        folder: of all runs of a method on a dataset.
    """
    numbers = [path.name.removeprefix("version_") for path in folder.glob("version_*") if path.is_dir()]
    return folder / f"version_{max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1}"


def run_of(checkpoint: str | None) -> Path | None:
    """Return the folder of the run that wrote a checkpoint; None where it is no run's, or nothing can be written there.

    Args:
        checkpoint: as the command line names it.
    """
    place = Path(checkpoint or "")
    folder = place.parent.parent
    own = place.parent.name == "checkpoints" and (folder / "config.yaml").is_file()
    return folder if own and os.access(folder, os.W_OK | os.X_OK) else None


@contextmanager
def removed_unless_begun(trainer: Trainer, folder: Path | None) -> Iterator[None]:
    """Leave no folder behind of a run that ends with an error before its first step.

    Args:
        trainer: counts the steps.
        folder: of the run; None, or one that is there before, is left alone.
    """
    new = folder is not None and trainer.is_global_zero and not folder.exists()
    try:
        yield
    except BaseException:
        if new and folder is not None and trainer.global_step == 0:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other runs are there
                folder.parent.rmdir()
        raise
