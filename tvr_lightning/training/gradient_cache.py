"""Large batches on small cards: encode in chunks, take the loss over all, encode again with the cached gradient.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021): the loss needs all
features of a batch, but not the encoders' activations. These are computed once without keeping them, and again, chunk
by chunk, when the gradient of a chunk's features is known. Memory is that of one chunk, the gradient that of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from tvr_lightning.features import Record

B = TypeVar("B", bound=Record)
R = TypeVar("R", bound=Record)


def encode_in_chunks(encode: Callable[[B], R], batch: B, chunk: int) -> R:
    """Return `encode(batch)`, at the memory of `chunk` items in the forward and in the backward pass.

    The second encoding of a chunk draws the random numbers of the first. Plain autograd carries the gradient, so that
    clipping, accumulation, mixed precision, DDP and FSDP2 stay what they are.

    Args:
        encode: a batch to features, item by item; what one item yields must not depend on the others.
        batch: B items.
        chunk: most items encoded at a time; the last chunk may be smaller.

    Raises:
        ValueError: `chunk` is below 1.
    """
    if chunk < 1:
        raise ValueError(f"a chunk must have at least 1 item, got {chunk}")
    parts: list[Any] = [
        checkpoint(encode, batch[start : start + chunk], use_reentrant=False) for start in range(0, len(batch), chunk)
    ]
    return type(parts[0]).cat(parts)
