"""Pieces of large tensors that stay in a processor's caches while several operators go over them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

PIECE = 2**18
"""Elements of a piece on a CPU: a megabyte of float32."""
LARGE_PIECE = 2**24
"""Elements of a piece elsewhere."""


def pieces_of(tensor: Tensor, axis: int = 0) -> Iterator[slice]:
    """Yield slices of an axis, each with as many items as a piece has elements for, and at least one.

    Example:
        >>> import torch
        >>> list(pieces_of(torch.empty(5, 2**17)))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    count = tensor.shape[axis]
    elements = PIECE if tensor.device.type == "cpu" else LARGE_PIECE
    step = max(elements * count // max(tensor.numel(), 1), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
