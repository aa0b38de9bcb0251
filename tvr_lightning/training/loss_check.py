"""Check for finite losses, gradients and weights, so that neither a step nor a checkpoint contains a broken value.

Losses are kept on the device until the backward pass is queued. One reduction before the optimizer step then covers
them and the gradient, and is the only time in a step that the host waits for the device.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.training.distributed import world_size

FLOAT32 = "If CLIP trains in float16, add recipes/variants/float32.yaml to train it in float32."


class LossCheck:
    """Check of a run's losses and gradients: call `start` with every batch, and `finish` before the optimizer step.

    With several processes, the same reduction tells all of them about the signals that one of them received.

    Attributes:
        stop: Signal that this process received; 0 for none.
        stop_all: Signal that a process had received at the last check; 0 for none.
    """

    def __init__(self) -> None:
        self.stop = self.stop_all = 0
        self._pending: list[tuple[Sequence[str], Tensor, Sequence[str]]] = []

    def start(self, terms: Mapping[str, Tensor], videos: Sequence[str]) -> None:
        """Keep the terms of a batch's loss for `finish`."""
        values = torch.stack([term.detach().reshape(()).float() for term in terms.values()])
        self._pending.append((list(terms), values, videos))

    def finish(self, module: LightningModule, gradients: bool = False) -> None:
        """Raise a UserError if a pending loss, or with `gradients` the gradient of a parameter, is not finite."""
        pending = self._pending
        self._pending = []
        if not pending and not gradients:
            return
        parameters = dict(module.named_parameters())
        found = {name: value.grad for name, value in parameters.items() if gradients and value.grad is not None}
        sums = torch.stack([torch.zeros((), device=module.device), *(values.sum() for _, values, _ in pending)])
        flags = torch.stack([~sums.isfinite().all(), ~_finite(found.values(), module.device)]).float()
        flags = torch.cat([flags, flags.new_full((1,), self.stop)])
        loss_failed, gradient_failed, stop = _of_all_devices(flags)
        self.stop_all = int(stop)
        step = module.global_step
        if loss_failed and (broken := _not_finite(parameters)):
            raise UserError(f"step {step}: the weights {abbreviated(broken)} are not finite. {FLOAT32}")
        if loss_failed:
            raise UserError(
                f"step {step}: the loss is not finite: {_broken_terms(pending)}. Lower the learning rate, or check "
                f"these files with `tvr data check`. {FLOAT32}"
            )
        if gradient_failed:
            raise UserError(
                f"step {step}: the loss is finite, but not the gradient of "
                f"{abbreviated(_not_finite(found)) or 'another device'}. The step was not taken. Lower the learning "
                f"rate, or find the function with an infinite derivative, such as the square root of 0. {FLOAT32}"
            )


def check_weights(module: LightningModule, state: Mapping[str, Tensor]) -> None:
    """Raise a UserError on all devices if a trained weight in the `state` to save is not finite on one of them."""
    trained = {name: state[name] for name, value in module.named_parameters() if value.requires_grad and name in state}
    (failed,) = _of_all_devices(~_finite(trained.values(), module.device)[None])
    if failed:
        raise UserError(
            f"step {module.global_step}: the weights {abbreviated(_not_finite(trained)) or 'another device'} are not "
            f"finite, so that no checkpoint is written and the previous one stays. Lower the learning rate. {FLOAT32}"
        )


def _finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return whether the norm of every tensor, or of this device's shard of it, is finite, as a tensor ()."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kinds.setdefault(local.dtype, []).append(local.detach())
    norms = [torch.zeros((), device=device)]
    for dtype, group in kinds.items():
        # The norm of a float16 tensor may exceed its dtype.
        norms += torch._foreach_norm(group, 2, dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    return torch.stack([norm.to(device) for norm in norms]).isfinite().all()


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not _finite([tensor], tensor.device)]


def _of_all_devices(flags: Tensor) -> list[float]:
    """Return the largest value of each flag on any device, since averaged gradients spread a broken loss to all."""
    if world_size() > 1:
        distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    return flags.tolist()


def _broken_terms(pending: Iterable[tuple[Sequence[str], Tensor, Sequence[str]]]) -> str:
    """Return the terms and the videos of the first batch whose loss is not finite."""
    for names, values, videos in pending:
        if not math.isfinite(values.sum()):
            terms = zip(names, values.tolist(), strict=True)
            broken = [f"{name} = {value:g}" for name, value in terms if not math.isfinite(value)]
            found = ", ".join(broken) or f"the sum of {', '.join(names)}"
            return f"{found}; the batch's videos are {', '.join(videos)}"
    return "on another device"
