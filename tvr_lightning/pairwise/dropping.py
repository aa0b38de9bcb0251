"""Dropout of the elements of many vectors, whose draws are most of what it costs on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LEVELS = 2**16


def left_over(probability: float, device: torch.device) -> float:
    """Return the number that elements which stay are multiplied with, so that their mean is that of the values.

    Args:
        probability: of an element to become zero.
        device: of the values.

    Example:
        >>> left_over(0.75, torch.device("cpu"))
        4.0
    """
    return _LEVELS / (_LEVELS - _threshold(probability)) if device.type == "cpu" else 1 / (1 - probability)


def staying(shape: Sequence[int], probability: float, device: torch.device) -> Tensor:
    """Return which elements dropout leaves, each drawn on its own: 1 or 0, uint8 of the shape.

    On a CPU torch draws a number of 53 bits for each element, which takes longer than a linear layer of 512 columns.
    Here it is 16 bits, so that the probability is the nearest multiple of 1 / 65,536. They are bytes because a product
    with bytes is several times faster than one with truth values, and than choosing.

    Args:
        shape: of the values.
        probability: of an element to become zero, below 1.
        device: of the values; the random numbers are torch's own for it.

    Example:
        >>> staying((1000,), 0.5, torch.device("cpu")).unique()
        tensor([0, 1], dtype=torch.uint8)
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - probability)
    count = torch.Size(shape).numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
    return (bits >= _threshold(probability) - _LEVELS // 2).view(torch.uint8).view(shape)


def drop(values: Tensor, probability: float) -> Tensor:
    """Return values (any shape) with elements set to zero at random, each on its own; see `left_over`.

    Example:
        >>> drop(torch.ones(1000), 0.5).unique()
        tensor([0., 1.])
    """
    return values * staying(values.shape, probability, values.device)


def _threshold(probability: float) -> int:
    return min(round(probability * _LEVELS), _LEVELS - 1)
