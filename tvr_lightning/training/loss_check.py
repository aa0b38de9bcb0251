"""Check for finite losses, copied to the host asynchronously and evaluated before the optimizer step.

Reading a loss on the host synchronizes with the device, which is then idle until the host queues more work. Here the
loss terms are copied as soon as they are computed, while the host queues the backward pass, and are read afterwards.
The device stays busy, and no step is taken from a loss that is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from tvr_lightning.errors import UserError
from tvr_lightning.training.distributed import world_size


@dataclass
class _Asked:
    """Loss terms on their way to the host: their values, then 1 if the terms of all devices are finite, else 0."""

    step: int
    names: Sequence[str]
    videos: Sequence[str]
    values: Tensor
    copied: torch.cuda.Event | None

    def check(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        *values, everywhere = self.values.tolist()
        if everywhere:
            return
        broken = [
            f"{name} = {value:g}"
            for name, value in zip(self.names, values, strict=True)
            if not abs(value) < float("inf")
        ]
        if not broken and world_size() == 1:
            broken = [f"the sum of {', '.join(self.names)}"]
        found = (
            f"{', '.join(broken)}; the batch's videos are {', '.join(self.videos)}" if broken else "on another device"
        )
        raise UserError(
            f"step {self.step}: the loss is not finite: {found}. Lower the learning rate, or check these files with "
            "`tvr data check`. If CLIP trains in float16, add recipes/variants/float32.yaml to train it in float32."
        )


class LossCheck:
    """Check of a run's losses: call `ask` with every batch, and `check` before the gradients are used."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []

    def ask(self, terms: Mapping[str, Tensor], step: int, videos: Sequence[str]) -> None:
        """Start to copy the terms of a loss to the host, after checking the pending ones.

        Args:
            terms: Scalars by name, on one device.
            step: Optimizer step, for the message.
            videos: IDs of the batch's videos, for the message.

        Raises:
            UserError: The loss of an earlier batch was not finite.
        """
        self.check()
        values = torch.stack([term.detach().reshape(()).float() for term in terms.values()])
        finite = values.sum().isfinite().float().reshape(1)
        if world_size() > 1:
            # Gradients are averaged, so a non-finite loss on one device breaks the weights on all devices.
            distributed.all_reduce(finite, distributed.ReduceOp.MIN)
        values, copied = torch.cat([values, finite]), None
        if values.is_cuda:
            device, values = values, torch.empty(values.shape, pin_memory=True)
            values.copy_(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._asked.append(_Asked(step, list(terms), videos, values, copied))

    def check(self) -> None:
        """Wait for the pending terms and check them.

        Raises:
            UserError: A loss was not finite. The message contains the terms and videos, or refers to another device.
        """
        asked, self._asked = self._asked, []
        for each in asked:
            each.check()

    def forget(self) -> None:
        """Drop the pending terms, as needed at the start of a run."""
        self._asked.clear()
