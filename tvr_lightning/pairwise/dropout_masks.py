"""Dropout masks with fewer random bits, because drawing them takes most of the time of dropout on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

_LEVELS = 2**16


def dropout_mask(shape: Sequence[int], probability: float, device: torch.device) -> tuple[Tensor, float]:
    """Return a mask with independent elements, uint8, 0 for dropped, and the factor of the others that keeps the mean.

    On a CPU, 16 instead of torch's 53 random bits round the probability to a multiple of 1 / 65,536.
    """
    if device.type != "cpu":
        mask = torch.empty(shape, dtype=torch.uint8, device=device).bernoulli_(1 - probability)
        return mask, 1 / (1 - probability)
    threshold = min(round(probability * _LEVELS), _LEVELS - 1)
    count = torch.Size(shape).numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
    return (bits >= threshold - _LEVELS // 2).view(torch.uint8).view(shape), _LEVELS / (_LEVELS - threshold)
