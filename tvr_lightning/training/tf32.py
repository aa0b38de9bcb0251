"""TF32 in training: float32 products with a 10-bit mantissa; evaluation stays in float32."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from tvr_lightning.errors import UserError


class TF32(Callback):
    """Callback that lets NVIDIA GPUs round the factors of float32 products to TF32 in training steps.

    Encoders in bf16 are not affected, and neither are validation and test, whose products stay in float32.
    `benchmarks/results/tf32.md` reports the effect on losses and gradients.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):  # Ampere
            raise UserError(
                f"trainer.callbacks has TF32, which the device {device} does not support. Remove it, or run with "
                "trainer.accelerator gpu on an NVIDIA GPU of the Ampere generation or later"
            )

    @override
    def on_train_batch_start(self, *arguments: Any) -> None:
        torch.set_float32_matmul_precision("high")

    @override
    def on_train_batch_end(self, *arguments: Any, **named: Any) -> None:
        torch.set_float32_matmul_precision("highest")

    on_exception = on_train_batch_end
