"""Gradient caching for large batches: encode in chunks, compute the loss over all, and encode again for the gradient.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021): the loss needs all
features of a batch, but the encoders' activations only of one chunk, whose gradient is known when they are recomputed.
The gradient is that of the whole batch. Clipping, accumulation, mixed precision, DDP and FSDP2 work as usual.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from tvr_lightning.features import FeatureBatch

B = TypeVar("B", bound=FeatureBatch)
R = TypeVar("R", bound=FeatureBatch)


def encode_in_chunks(encode: Callable[[B], R], batch: B, chunk: int) -> R:
    """Return `encode(batch)`, encoding chunks again in the backward pass with the same random numbers."""
    chunks = [batch[start : start + chunk] for start in range(0, len(batch), chunk)]
    parts: list[Any] = [checkpoint(encode, items, use_reentrant=False) for items in chunks]
    return type(parts[0]).cat(parts)
