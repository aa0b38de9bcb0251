"""Check for finite losses, copied to the host asynchronously and evaluated before the optimizer step.

Reading a loss on the host synchronizes with the device, which is then idle until the host queues more work. Here the
loss terms are copied as soon as they are computed, while the host queues the backward pass, and are read afterwards.
The device stays busy, and no step is taken from a loss that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, distributed

from tvr_lightning.errors import UserError
from tvr_lightning.training.distributed import world_size


class LossCheck:
    """Check of a run's losses: call `start` with every batch, and `finish` before the gradients are used.

    With several processes, the same reduction tells all of them about the signals that one of them received.

    Attributes:
        stop: Signal that this process received; 0 for none.
        stop_all: Signal that a process had received at the last check; 0 for none.
    """

    def __init__(self) -> None:
        self.stop = self.stop_all = 0
        self._pending: tuple[int, Sequence[str], Sequence[str], Callable[[], list[float]]] | None = None

    def start(self, terms: Mapping[str, Tensor], step: int, videos: Sequence[str]) -> None:
        """Start to copy the terms of a loss to the host, after checking the pending ones as `finish` does."""
        self.finish()
        values = torch.stack([term.detach().reshape(()).float() for term in terms.values()])
        failed = (~values.sum().isfinite()).float()
        shared = torch.stack([failed, torch.full_like(failed, self.stop)])
        if world_size() > 1:
            # Gradients are averaged, so a non-finite loss on one device breaks the weights on all devices.
            distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        self._pending = step, list(terms), videos, _read_later(torch.cat([shared, values]))

    def finish(self) -> None:
        """Wait for the pending terms, and raise a UserError with the terms and videos if a loss was not finite."""
        if self._pending is None:
            return
        (step, names, videos, read), self._pending = self._pending, None
        failed, stop, *values = read()
        self.stop_all = int(stop)
        if not failed:
            return
        broken = [f"{name} = {value:g}" for name, value in zip(names, values, strict=True) if not math.isfinite(value)]
        if not broken and world_size() == 1:
            broken = [f"the sum of {', '.join(names)}"]
        found = f"{', '.join(broken)}; the batch's videos are {', '.join(videos)}" if broken else "on another device"
        raise UserError(
            f"step {step}: the loss is not finite: {found}. Lower the learning rate, or check these files with "
            "`tvr data check`. If CLIP trains in float16, add recipes/variants/float32.yaml to train it in float32."
        )


def _read_later(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy values to the host, and return a function that waits for them."""
    if not values.is_cuda:
        return values.tolist
    host = torch.empty(values.shape, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read
