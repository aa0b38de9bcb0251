"""TF32 in training: float32 products of the heads at ten bits of mantissa, evaluation exact as before."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from tvr_lightning.errors import UserError

COMPUTE_CAPABILITY = 8  # Ampere's, the first with TF32


class TF32(Callback):
    """Lets an NVIDIA card round the factors of float32 products to TF32 in training steps.

    Encoders in bf16 are not concerned, nor are validation and test, whose products stay float32.
    `benchmarks/results/tf32.md` says what it does to losses and gradients.

    Raises:
        UserError: as a run begins, where the device has no TF32.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse devices without TF32."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise UserError(
                f"trainer.callbacks has TF32, which the device {device} does not support. Remove it, or run with "
                "trainer.accelerator gpu on an NVIDIA GPU"
            )
        if torch.cuda.get_device_capability(device)[0] < COMPUTE_CAPABILITY:
            raise UserError(
                f"trainer.callbacks has TF32, which {torch.cuda.get_device_name(device)} does not support (GPUs since "
                "Ampere do). Remove it"
            )

    def on_train_start(self, *arguments: Any) -> None:
        """Round from now on."""
        torch.set_float32_matmul_precision("high")

    def on_validation_start(self, *arguments: Any) -> None:
        """Evaluate exactly."""
        torch.set_float32_matmul_precision("highest")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Round again where training goes on."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            torch.set_float32_matmul_precision("high")

    def on_train_end(self, *arguments: Any) -> None:
        """Leave the process as it was."""
        torch.set_float32_matmul_precision("highest")

    def on_exception(self, *arguments: Any) -> None:
        """Leave the process as it was."""
        torch.set_float32_matmul_precision("highest")
