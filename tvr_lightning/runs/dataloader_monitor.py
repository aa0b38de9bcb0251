"""Warning if a GPU waits for original video files during training, with the command that fixes it."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    """Callback that measures the time that the steps of a run wait for batches.

    Args:
        say: Function that reports the warning.
        devices: Device types to watch.
    """

    def __init__(self, say: Callable[[str], None] = rank_zero_info, devices: tuple[str, ...] = ("cuda", "mps")) -> None:
        self.say, self.devices = say, devices
        self._steps, self._began = 0, (0.0, 0.0)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        loader = getattr(data, "training_loader", None)
        if loader is None or pl_module.device.type not in self.devices:
            return
        if data.features is not None or data.copies is not None:
            return
        self._steps += 1
        now = time.perf_counter()
        if self._steps == WARM:
            self._began = now, loader.waited
        if self._steps == WARM + WATCHED:
            seconds, waited = now - self._began[0], loader.waited - self._began[1]
            if waited > MUCH * seconds:
                clips = WATCHED * loader.batch_size / seconds
                self.say(
                    f"The {pl_module.device.type.upper()} device waited for clips {100 * waited / seconds:.0f} % of "
                    f"the time, at {clips:.0f} clips per second. Small copies are read much faster: run `tvr data "
                    "compress --out FOLDER` with the --config and --data options of this run."
                )
