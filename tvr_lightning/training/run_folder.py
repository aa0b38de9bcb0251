"""The folder of a run: one for its results, configuration and checkpoints, whatever logger it has."""

from __future__ import annotations

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
