"""Cache-sized tiles of large tensors for several operators in sequence."""

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 2**18
"""Number of elements of a tile on a CPU: a megabyte of float32."""
LARGE_TILE = 2**24
"""Number of elements of a tile on other devices."""
FAST_LOOPS = ("cpu",)
"""Devices on which many small operations on data in the cache are faster than one large operation."""


def loops_are_fast(device: torch.device) -> bool:
    """Return whether to loop over items or cache-sized tiles. An export needs one operation for all instead."""
    return device.type in FAST_LOOPS and not torch.compiler.is_exporting()


def tiles_of(tensor: Tensor, axis: int = 0) -> Iterator[slice]:
    """Yield slices of an axis with as many items as fit in a tile, at least one."""
    count = tensor.shape[axis]
    return slices(count, tensor.numel() // max(count, 1), tensor.device)


def slices(count: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of `count` items with as many items as fit in a tile of a device, at least one."""
    step = max((TILE if loops_are_fast(device) else LARGE_TILE) // max(elements, 1), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
