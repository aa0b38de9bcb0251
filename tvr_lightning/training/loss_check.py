"""Check for finite losses, copied to the host asynchronously and evaluated before the optimizer step.

Reading a loss on the host leaves the device idle until the host queues more work. Here the loss terms are copied while
the host queues the backward pass, and read afterwards, so that no step is taken from a loss that is not finite.
"""

import math
from collections.abc import Mapping, Sequence

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
        self._pending: tuple[int, Sequence[str], Sequence[str], Tensor, torch.cuda.Event | None] | None = None

    def start(self, terms: Mapping[str, Tensor], step: int, videos: Sequence[str]) -> None:
        """Start to copy the terms of a loss to the host, after checking the pending ones as `finish` does."""
        self.finish()
        values = torch.stack([term.detach().reshape(()).float() for term in terms.values()])
        failed = (~values.sum().isfinite()).float()
        shared = torch.stack([failed, torch.full_like(failed, self.stop)])
        if world_size() > 1:
            # Gradients are averaged, so a non-finite loss on one device breaks the weights on all devices.
            distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        host = torch.cat([shared, values]).to("cpu", non_blocking=True)  # into pinned memory
        copied = torch.cuda.current_stream().record_event() if values.is_cuda else None
        self._pending = step, list(terms), videos, host, copied

    def finish(self) -> None:
        """Wait for the pending terms, and raise a UserError with the terms and videos if a loss was not finite."""
        if self._pending is None:
            return
        (step, names, videos, host, copied), self._pending = self._pending, None
        if copied is not None:
            copied.synchronize()
        failed, stop, *values = host.tolist()
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
