"""Numbers as one-hot rows, without asking the device what the largest one is."""

from __future__ import annotations

import torch
from torch import Tensor


def one_hot(index: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return rows (..., C) with 1 at `index` (...) int64 from 0 to C - 1, which is not checked, and 0 elsewhere."""
    return (index.unsqueeze(-1) == torch.arange(count, device=index.device)).to(dtype)
