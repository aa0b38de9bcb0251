"""One-hot encoding that does not synchronize with the device to find the largest index."""

import torch
from torch import Tensor


def one_hot(index: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return rows (..., C) with 1 at `index` (...) int64 and 0 elsewhere. The range, 0 to C - 1, is not checked."""
    return (index.unsqueeze(-1) == torch.arange(count, device=index.device)).to(dtype)
