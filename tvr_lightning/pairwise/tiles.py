"""Cache-sized tiles of large tensors for several operators in sequence."""

from collections.abc import Iterator

from torch import Tensor

TILE = 2**18
"""Number of elements of a tile on a CPU: a megabyte of float32."""
LARGE_TILE = 2**24
"""Number of elements of a tile on other devices."""


def tiles_of(tensor: Tensor, axis: int = 0) -> Iterator[slice]:
    """Yield slices of an axis with as many items as fit in a tile, at least one."""
    count = tensor.shape[axis]
    elements = TILE if tensor.device.type == "cpu" else LARGE_TILE
    step = max(elements * count // max(tensor.numel(), 1), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
