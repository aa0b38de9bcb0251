"""Restricted trainer that keeps the ground truth from methods while they encode or score."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import LightningModule

from tvr_lightning.errors import UserError

# Attributes of the trainer that give no access to data.
OPEN = {
    "precision", "precision_plugin", "current_epoch", "global_step", "max_epochs", "max_steps", "global_rank",
    "local_rank", "node_rank", "world_size", "num_nodes", "num_devices", "is_global_zero", "training", "validating",
    "testing", "predicting", "evaluating", "sanity_checking", "barebones", "logger", "loggers",
}  # fmt: skip

_TRAINERS: WeakKeyDictionary[RestrictedTrainer, Any] = WeakKeyDictionary()


class RestrictedTrainer:
    """Trainer that exposes the state of the run to a method, but no data.

    It prevents accidental leaks and shortcuts, not deliberate attacks: Python code can always find a way to an object.

    Args:
        trainer: trainer that it replaces.
        method: name of the method, for messages.
        record: list to which an audit adds the accessed attributes. Access is then permitted instead of raising an
            error.
        datamodule: data module that is returned if accesses are recorded.
    """

    def __init__(self, trainer: Any, method: str, record: list[str] | None = None, datamodule: Any = None) -> None:
        _TRAINERS[self] = trainer  # no attribute leads to it
        self._method = method
        self._record = record
        self._datamodule = datamodule

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, or record or reject the access if the attribute gives access to data."""
        if name not in OPEN:
            if self._record is None:
                raise UserError(
                    f"{self._method} accesses trainer.{name} while it encodes or scores, which gives access to the "
                    "ground truth. A score may depend only on its text and its video. Take settings from the recipe"
                )
            self._record.append(f"trainer.{name}")
            if name == "datamodule":
                return self._datamodule
        return getattr(_TRAINERS[self], name)


class RestrictedModule(LightningModule):
    """Module that evaluations can separate from the data of its trainer."""

    @contextmanager
    def restricted(self) -> Iterator[None]:
        """Restrict access to the trainer's data while the method encodes or scores in an evaluation.

        `self.log` and attributes that describe the run, such as `self.trainer.global_step`, remain available.
        """
        trainer = self._trainer
        if trainer is None or isinstance(trainer, RestrictedTrainer):  # an audit has replaced it already
            yield
            return
        self.trainer = RestrictedTrainer(trainer, type(self).__name__)  # type: ignore[assignment]  # a stand-in
        try:
            yield
        finally:
            self.trainer = trainer

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log through Lightning; an audit logs nothing."""
        trainer: Any = self._trainer
        if not isinstance(trainer, RestrictedTrainer):
            super().log(*args, **kwargs)
        elif trainer._record is None:
            self.trainer = _TRAINERS[trainer]
            try:
                super().log(*args, **kwargs)
            finally:
                self.trainer = trainer  # type: ignore[assignment]
