"""Gathering of features over devices, with the gradient that a contrastive loss needs.

Every device evaluates the same loss on the batch of all devices, and the strategy (DDP, FSDP) averages the gradients of
the devices. The gradient of the gather then determines the effective gradient:

- `global`: the gradients of all devices are summed, so that after averaging every parameter receives exactly the
  gradient of the whole batch on one device.
- `local`: the same gradient, but each device scores its own texts against all videos and all texts against its own
  videos, 2 B W B pairs instead of (W B)^2; only for losses that are InfoNCE over rows and columns.
- `own-slice`: each device keeps only the gradient of its own items, as the `AllGather` of CLIP4Clip and the released
  codes based on it does (modules/until_module.py). The encoders then receive 1 / W of the gradient and the heads the
  full gradient. In float32, Adam hides the difference unless gradients are clipped; in float16, BertAdam's steps depend
  on the size of the gradient (benchmarks/results/released-devices.md).
- `none`: nothing is gathered; the other items of a device's own batch are the only negatives (GAID's released code).

With `released_devices`, the last two do on any number of devices W what they do on the R devices of a published run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, IndexedFeatures
from tvr_lightning.option_types import Role

Gather = Annotated[Literal["global", "local", "own-slice", "none"], Role.TRAINING]
R = TypeVar("R", bound=FeatureBatch)
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Gather nothing inside the context, in which this process works while the others wait."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def world_size() -> int:
    """Return the number of processes that work together; 1 without torch.distributed."""
    return dist.get_world_size() if _together() else 1


def rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if _together() else 0


def _together() -> bool:
    return dist.is_available() and dist.is_initialized() and not _ALONE.get()


def check_released_devices(devices: int | None, gather: Gather | None, batch_size: int = 0) -> None:
    """Refuse a number of released devices that the gather or the batch size does not allow."""
    if devices is not None and gather == "local":
        raise UserError(
            f"gather: local has the same gradient on any number of devices, so released_devices {devices} has no "
            "effect. Set released_devices to null, or use gather: own-slice"
        )
    if devices is not None and batch_size % devices:
        raise UserError(
            f"batch_size {batch_size} cannot be divided among the {devices} devices of the published run. Use a "
            f"multiple of {devices}, or set model.init_args.released_devices to null"
        )


def device_warnings(devices: int | None, gather: Gather, trained_on: int | None) -> list[str]:
    """Return warnings for a results table if training differed from that on the released devices."""
    if gather == "global" and (devices or 1) > 1:
        return [f"trained with gather: global; the encoders of the published run got 1/{devices} of this gradient"]
    if gather in ("own-slice", "none") and devices is None and (trained_on or 1) > 1:
        return [f"trained with gather: {gather} on {trained_on} devices, on whose number the gradient depends"]
    return []


def _own_slice(tensor: Tensor, scale: float) -> Tensor:
    """Concatenate tensors (B, ...) of all devices; the gradient is that of the own items, times `scale`."""
    own = tensor.detach()
    parts = [torch.empty_like(own) for _ in range(world_size())]
    if len(parts) > 1:
        dist.all_gather(parts, own.contiguous())
    parts[rank()] = own + (tensor - own) * scale if tensor.requires_grad else own
    return torch.cat(parts)


def gather_tensor(tensor: Tensor, mode: Gather = "global", released_devices: int | None = None) -> Tensor:
    """Concatenate tensors (B, ...), of the same length on every device, to (W * B, ...) in rank order.

    `mode` determines the gradient, as described in the module's docstring; `none` returns the input.
    """
    scale = world_size() / released_devices if released_devices and mode == "own-slice" else 1.0
    if mode == "none" or (world_size() == 1 and scale == 1):
        return tensor
    if not tensor.requires_grad or mode == "own-slice":
        return _own_slice(tensor, scale)
    group = dist.group.WORLD
    assert group is not None
    # Renamed in torch 2.13.
    gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    # Wait also for features that no loss uses (words in GARE): otherwise they are kept until the process ends.
    return collectives.wait_tensor(gather(tensor.contiguous(), gather_dim=0, group=group))


def gather_record(record: R, mode: Gather = "global", released_devices: int | None = None) -> R:
    """Gather every tensor of a record with the same length on every device; lists are gathered as Python objects."""
    if mode == "none":
        return record

    def gather(value: Tensor | list[Any]) -> Tensor | list[Any]:
        if isinstance(value, Tensor):
            return gather_tensor(value, mode, released_devices)
        return [item for part in gather_objects(value) for item in part]

    return record.apply(gather, (Tensor, list))


def released_parts(record: R, devices: int) -> list[R]:
    """Divide the items of all processes among released devices, to which samplers distribute them in turn.

    Return this process's parts, or all parts, gathered, if the processes do not divide the number of devices. In both
    cases, the mean over processes of the mean over parts is the mean over all devices.
    """
    world = world_size()
    if devices % world == 0:
        devices //= world
    else:
        record = gather_record(record)
        if devices > 1:  # in the order of the samples
            record = record[torch.arange(len(record)).view(world, -1).T.flatten()]
    return [record[part::devices] for part in range(min(devices, len(record)))]


@torch.no_grad()
def gather_batches(batches: Sequence[IndexedFeatures[R]], device: torch.device) -> IndexedFeatures[R] | None:
    """Join the encoded batches of all devices in rank order; devices may have different numbers of items.

    Every device must call it, even without a batch, because all unreadable videos may be on the same device. The result
    is the same on every device and without gradient; None if no device has an item.
    """
    own = IndexedFeatures.cat(batches) if batches else None
    if world_size() == 1:
        return own
    parts = [part for part in gather_objects(None if own is None else own.to("cpu")) if part is not None]
    return IndexedFeatures.cat(parts).to(device) if parts else None


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all devices in rank order (any picklable value; `[value]` with one device)."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
