"""How far a training run is, and how long the whole of it still takes: for the screen, and for a waiting process."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from tvr_lightning.progress import clock, said_regularly


class TimeLeft:
    """Judges from the steps so far; what comes before the first, such as starting workers, comes once."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def step_ended(self, trainer: Trainer) -> None:
        """Count from the first step that ended."""
        if self._began is None:
            self._began = time.monotonic(), trainer.global_step

    def seconds(self, trainer: Trainer) -> float | None:
        """Return the seconds that the rest of training takes, evaluations as often as so far; None before two steps."""
        if self._began is None or trainer.global_step <= self._began[1]:
            return None
        steps = trainer.global_step - self._began[1]
        left = trainer.estimated_stepping_batches - trainer.global_step
        return (time.monotonic() - self._began[0]) / steps * max(left, 0)


class RunProgressBar(RichProgressBar):
    """Lightning's bar of an epoch, with epochs counted from 1 and the time left of the whole run.

    Without a terminal, a line every ten seconds says the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = TimeLeft()
        self._doing = "starting"
        self._metrics: dict[str, Any] = {}
        self._read = 0.0
        self._saying = ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to say how far the run is."""
        super().setup(trainer, pl_module, stage)
        self._saying.close()
        if trainer.is_global_zero and self._progress_console_is_no_terminal():
            self._saying.enter_context(said_regularly(lambda: [self._doing]))

    @staticmethod
    def _progress_console_is_no_terminal() -> bool:
        from rich import get_console

        return not get_console().is_terminal

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End with the last state."""
        self._saying.close()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say no more."""
        self._saying.close()
        super().on_exception(trainer, pl_module, exception)

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any, **named: Any) -> None:
        """Note how far training is."""
        self._left.step_ended(trainer)
        left = self._left.seconds(trainer)
        told = "" if left is None else f", {clock(left)} left of the run"
        epoch = self._get_train_description(trainer.current_epoch).strip()
        self._doing = f"{epoch}, step {trainer.global_step}/{trainer.estimated_stepping_batches:.0f}{told}"
        super().on_train_batch_end(trainer, *arguments, **named)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Note how far validation is."""
        self._doing = f"validating, batch {batch_idx + 1}"
        super().on_validation_batch_end(trainer, pl_module, outputs, batch, batch_idx, *rest)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Note how far the test is."""
        self._doing = f"testing, batch {batch_idx + 1}"
        super().on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx, *rest)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *rest: Any
    ) -> None:
        """Note how far prediction is."""
        self._doing = f"predicting, batch {batch_idx + 1}"
        super().on_predict_batch_end(trainer, pl_module, outputs, batch, batch_idx, *rest)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return what is logged for the bar, and the time left; without the number of the run's folder.

        Read twice a second while training: reading a loss waits for all that its device has queued.
        """
        now = time.monotonic()
        if trainer.training and now - self._read < 0.5:
            return self._metrics
        self._read = now
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        left = self._left.seconds(trainer)
        self._metrics = metrics if left is None else {**metrics, "run left": str(timedelta(seconds=round(left)))}
        return self._metrics

    def _get_train_description(self, current_epoch: int) -> str:
        of = f"/{self.trainer.max_epochs}" if self.trainer.max_epochs not in (None, -1) else ""
        return f"Epoch {current_epoch + 1}{of}".ljust(len(self.validation_description))


class ProgressFile(Callback):
    """Writes how far a run is to a file that another process reads.

    Args:
        file: JSON with `doing`, and `left` in seconds where they can be told; appears whole.
        seconds: between two writings.
    """

    def __init__(self, file: Path, seconds: float = 2.0) -> None:
        self.file, self.seconds = file, seconds
        self._left, self._written = TimeLeft(), 0.0

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any, **named: Any) -> None:
        """Write the step."""
        self._left.step_ended(trainer)
        of = trainer.estimated_stepping_batches
        self._write(trainer, f"training, step {trainer.global_step} of {of:.0f}", self._left.seconds(trainer))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write that the run validates."""
        self._write(trainer, "validating", self._left.seconds(trainer) if trainer.global_step else None)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write that the run is at its test."""
        self._written = 0.0
        self._write(trainer, "testing", None)

    def _write(self, trainer: Trainer, doing: str, left: float | None) -> None:
        if not trainer.is_global_zero or time.monotonic() - self._written < self.seconds:
            return
        self._written = time.monotonic()
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps({"doing": doing, "left": left}), encoding="utf-8")
        draft.replace(self.file)
