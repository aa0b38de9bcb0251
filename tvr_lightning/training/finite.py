"""Whether losses are finite: asked on the device, answered before the optimiser steps.

Reading a loss on the host waits for everything the device has queued, so that it idles until the host has queued more.
Here its terms are copied as soon as they are known, while the host goes on to queue the backward pass, and read after
that: the device has work meanwhile, and no step is taken from a loss that is not finite.
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
    """Terms on their way to the host: their values, then 1 where those of all devices are finite, else 0."""

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


class FiniteLosses:
    """Watches the losses of a run; ask with every batch, and check before anything is made of the gradients."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []

    def ask(self, terms: Mapping[str, Tensor], step: int, videos: Sequence[str]) -> None:
        """Start to copy the terms of a loss to the host; what was asked before is checked first.

        Args:
            terms: scalars by name, on one device.
            step: of the optimiser, for the message.
            videos: ids of the batch's videos, for the message.

        Raises:
            UserError: an earlier batch's loss was not finite.
        """
        self.check()
        values = torch.stack([term.detach().reshape(()).float() for term in terms.values()])
        finite = values.sum().isfinite().float().reshape(1)
        if world_size() > 1:
            # Their gradients are averaged: what is not finite on one device breaks the weights of all.
            distributed.all_reduce(finite, distributed.ReduceOp.MIN)
        values, copied = torch.cat([values, finite]), None
        if values.is_cuda:
            device, values = values, torch.empty(values.shape, pin_memory=True)
            values.copy_(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._asked.append(_Asked(step, list(terms), videos, values, copied))

    def check(self) -> None:
        """Wait for what was asked.

        Raises:
            UserError: a loss was not finite; says of which terms and videos, or that it was another device's.
        """
        asked, self._asked = self._asked, []
        for each in asked:
            each.check()

    def forget(self) -> None:
        """Leave what was asked unanswered, as a run does that begins."""
        self._asked.clear()
