"""The bar of a training run, which says how long the whole run still takes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class RunProgressBar(RichProgressBar):
    """Lightning's bar of an epoch, with epochs counted from 1 and the time left of the whole run."""

    def __init__(self) -> None:
        super().__init__()
        self._began: tuple[float, int] | None = None

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any, **named: Any) -> None:
        """Count from the first step that ended: what comes before it, such as starting workers, comes once."""
        if self._began is None:
            self._began = time.monotonic(), trainer.global_step
        super().on_train_batch_end(trainer, *arguments, **named)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return what is logged for the bar, and the time left; without the number of the run's folder."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        left = self.seconds_left(trainer)
        return metrics if left is None else {**metrics, "run left": str(timedelta(seconds=round(left)))}

    def seconds_left(self, trainer: Trainer) -> float | None:
        """Return the seconds that the rest of training takes, evaluations as often as so far; None before two steps."""
        if self._began is None or trainer.global_step <= self._began[1]:
            return None
        steps = trainer.global_step - self._began[1]
        left = trainer.estimated_stepping_batches - trainer.global_step
        return (time.monotonic() - self._began[0]) / steps * max(left, 0)

    def _get_train_description(self, current_epoch: int) -> str:
        of = f"/{self.trainer.max_epochs}" if self.trainer.max_epochs not in (None, -1) else ""
        return f"Epoch {current_epoch + 1}{of}".ljust(len(self.validation_description))
