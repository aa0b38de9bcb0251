"""Warning if a GPU waits for original video files during training, with the command that fixes it."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

WARM, WATCHED = 10, 50
"""Number of steps before timing starts (worker startup), and number of timed steps."""
MUCH = 0.3
"""Minimum share of the time spent waiting that causes a warning."""


class DataloaderMonitor(Callback):
    """Callback that measures the time that steps on a device of one of the types wait for batches."""

    def __init__(self, devices: tuple[str, ...] = ("cuda", "mps")) -> None:
        self.devices = devices
        self._steps, self._began, self._waited = 0, 0.0, 0.0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        loader = getattr(data, "training_loader", None)
        device = pl_module.device.type
        if loader is None or device not in self.devices or data.features is not None or data.copies is not None:
            return
        self._steps += 1
        if self._steps == WARM:
            self._began, self._waited = time.perf_counter(), loader.waited
        elif self._steps == WARM + WATCHED:
            seconds = time.perf_counter() - self._began
            share = (loader.waited - self._waited) / seconds
            if share > MUCH:
                rank_zero_info(
                    f"The {device.upper()} device waited for clips {share:.0%} of the time, at "
                    f"{WATCHED * loader.batch_size / seconds:.0f} clips per second. Small copies are read much faster: "
                    "run `tvr data compress --out FOLDER` with the --config and --data options of this run."
                )
