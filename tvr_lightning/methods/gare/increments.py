"""What GARE's losses read of the increments of all pairs, in pieces that stay in a processor's caches.

Written as an operator each, products, means and deviations would read all elements of all increments several times, and
their gradients write as many. Here one backward pass writes one gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tvr_lightning.layers.cosine import COSINE_EPS

PIECE = 2**18
"""Elements of a piece on a CPU."""
LARGE_PIECE = 2**26
"""Elements of a piece elsewhere."""


class Increments:
    """The increments of all pairs, measured.

    Args:
        vectors: (N, M, D).
        over: the axis of at least 2 items that means and deviations are taken over: 0 texts, 1 videos, None for none.
        products: whether lengths and cosines are asked for.

    Attributes:
        lengths: (N, M).
        cosines: (N, M, M) of the increments of a text with one another.
        mean: (M, D) over the texts, or (N, D) over the videos.
        deviation: of the same shape, unbiased.

    Example:
        >>> found = Increments(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), over=1)  # N 1, M 2, D 2
        >>> found.lengths, found.cosines[0, 0], found.mean
        (tensor([[5., 2.]]), tensor([1.0000, 0.8000]), tensor([[1.5000, 3.0000]]))
    """

    def __init__(self, vectors: Tensor, over: int | None = None, products: bool = True) -> None:
        met, self.mean, self.deviation = _Measured.apply(vectors, over, products)
        if products:
            self.lengths = met.diagonal(dim1=1, dim2=2).clamp(min=COSINE_EPS**2).sqrt()
            self.cosines = met / (self.lengths.unsqueeze(1) * self.lengths.unsqueeze(2))

    @classmethod
    def of(cls, vectors: Tensor | Increments, over: int | None = None, products: bool = True) -> Increments:
        """Return increments that are measured already as they are."""
        return vectors if isinstance(vectors, Increments) else cls(vectors, over, products)


class _Measured(torch.autograd.Function):
    """Products (N, M, M) of every text's increments, and means and deviations, each None where it is not asked for."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, over: int | None, products: bool) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        met = torch.bmm(vectors, vectors.transpose(1, 2)) if products else None
        mean = deviation = None
        if over is not None:
            count, kept = vectors.shape[over], 1 - over
            mean = vectors.new_empty(vectors.shape[kept], vectors.shape[2])
            deviation = torch.empty_like(mean)
            for some in _pieces(vectors, kept):
                piece = vectors[:, some] if over == 0 else vectors[some]
                mean[some], away = _centred(piece, over)
                deviation[some] = (away.square_().sum(over) / (count - 1)).sqrt()
        ctx.save_for_backward(vectors, deviation)
        ctx.over = over
        return met, mean, deviation

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_met: Tensor | None, of_mean: Tensor | None, of_deviation: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        vectors, deviation = ctx.saved_tensors
        gradient = torch.empty_like(vectors)
        if of_met is None:
            gradient.zero_()
        else:
            both = of_met + of_met.transpose(1, 2)
            for some in _pieces(vectors, 0):
                gradient[some] = torch.bmm(both[some], vectors[some])
        over = ctx.over
        if over is None or (of_mean is None and of_deviation is None):
            return gradient, None, None
        count = vectors.shape[over]
        shift = torch.zeros_like(deviation) if of_mean is None else of_mean / count
        stretch = torch.zeros_like(deviation) if of_deviation is None else of_deviation / (deviation * (count - 1))
        stretch = stretch.masked_fill(deviation == 0, 0.0)
        for some in _pieces(vectors, 1 - over):
            chosen = (slice(None), some) if over == 0 else some
            piece = gradient[chosen]
            piece.addcmul_(_centred(vectors[chosen], over)[1], stretch[some].unsqueeze(over))
            piece.add_(shift[some].unsqueeze(over))
        return gradient, None, None


def _pieces(vectors: Tensor, axis: int) -> Iterator[slice]:
    """Yield slices of an axis of (N, M, D) with as many items as a piece has."""
    count = vectors.shape[axis]
    elements = PIECE if vectors.device.type == "cpu" else LARGE_PIECE
    step = max(elements * count // max(vectors.numel(), 1), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _centred(vectors: Tensor, over: int) -> tuple[Tensor, Tensor]:
    """Return the mean over an axis, and what vectors (n, m, D) are away from it.

    An anchor's increments may be as good as equal. What they are away, and gradients most of all, would then be the
    rounding of their mean; differences from one of them are exact in float32.
    """
    first = vectors.narrow(over, 0, 1)
    away = vectors - first
    mean = away.mean(over, keepdim=True)
    return (first + mean).squeeze(over), away.sub_(mean)
