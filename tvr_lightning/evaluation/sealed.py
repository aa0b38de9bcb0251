"""What stands for the trainer while a method encodes or scores, so that the ground truth is out of its reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from tvr_lightning.errors import UserError

OPEN = {
    "precision", "precision_plugin", "current_epoch", "global_step", "max_epochs", "max_steps", "global_rank",
    "local_rank", "node_rank", "world_size", "num_nodes", "num_devices", "is_global_zero", "training", "validating",
    "testing", "predicting", "evaluating", "sanity_checking", "barebones", "logger", "loggers",
}  # fmt: skip
"""Attributes of the trainer from which no data can be reached."""


class SealedTrainer:
    """A trainer of which a method may read how it runs, but not what it is tested on.

    Against shortcuts and slips, not against malice: nothing in Python hides an object from code that hunts for it.

    Args:
        trainer: the one that it stands for.
        method: name of the method, for messages.
        record: an audit's: what was asked for, in place of an error. Everything is handed out.
        datamodule: what is handed out as the data module, where asking is recorded.
    """

    def __init__(self, trainer: Any, method: str, record: list[str] | None = None, datamodule: Any = None) -> None:
        self._sealed = trainer
        self._method = method
        self._record = record
        self._datamodule = datamodule

    @property
    def records(self) -> bool:
        """Whether it is an audit's."""
        return self._record is not None

    def __getattr__(self, name: str) -> Any:
        """Return what is open, or refuse, or note down that it was asked for."""
        if name not in OPEN:
            if self._record is None:
                raise UserError(
                    f"{self._method} accesses trainer.{name} while it encodes or scores, which gives access to the "
                    "ground truth. A score may depend only on its text and its video. Take settings from the recipe"
                )
            self._record.append(f"trainer.{name}")
            if name == "datamodule":
                return self._datamodule
        return getattr(self._sealed, name)


class SealedModule(LightningModule):
    """A module that evaluations can seal off from the data of its trainer."""

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Keep the trainer's data out of the method's reach while it encodes or scores in an evaluation.

        `self.log` works as ever, and so does what says how the run goes, such as `self.trainer.global_step`.
        """
        trainer = self._trainer
        if trainer is None or isinstance(trainer, SealedTrainer):  # an audit's is in place already
            yield
            return
        self.trainer = SealedTrainer(trainer, type(self).__name__)  # type: ignore[assignment]  # stands for one
        try:
            yield
        finally:
            self.trainer = trainer

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as Lightning does; within an audit nothing is logged."""
        trainer: Any = self._trainer
        if not isinstance(trainer, SealedTrainer):
            super().log(*args, **kwargs)
        elif not trainer.records:
            self.trainer = trainer._sealed
            try:
                super().log(*args, **kwargs)
            finally:
                self.trainer = trainer  # type: ignore[assignment]
