"""What GARE's losses read of the increments of all pairs, in pieces that stay in a processor's caches.

Written as an operator each, products, means and deviations would read all elements of all increments several times, and
their gradients write as many. Here one backward pass writes one gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tvr_lightning.layers.cosine import COSINE_EPS
from tvr_lightning.pairwise.pieces import pieces_of


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
        self.lengths, self.cosines, self.mean, self.deviation = _Measured.apply(vectors, over, products)

    @classmethod
    def of(cls, vectors: Tensor | Increments, over: int | None = None, products: bool = True) -> Increments:
        """Return increments that are measured already as they are."""
        return vectors if isinstance(vectors, Increments) else cls(vectors, over, products)


class _Measured(torch.autograd.Function):
    """Lengths (N, M), cosines (N, M, M), means and deviations, each None where it is not asked for."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, over: int | None, products: bool) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        lengths = cosines = None
        if products:
            cosines = torch.bmm(vectors, vectors.transpose(1, 2))
            lengths = cosines.diagonal(dim1=1, dim2=2).clamp(min=COSINE_EPS**2).sqrt()
            for some in pieces_of(cosines, 0):
                cosines[some].div_(lengths[some].unsqueeze(1)).div_(lengths[some].unsqueeze(2))
        mean = deviation = shift = None
        if over is not None:
            # An anchor's increments may be as good as equal. What they are away from their mean, and gradients most of
            # all, would then be the rounding of the mean; differences from one of them are exact in float32.
            first, count = vectors.narrow(over, 0, 1), vectors.shape[over]
            shift, deviation = torch.empty_like(first), torch.empty_like(first)
            for some in pieces_of(vectors, 1 - over):
                away = vectors[_at(some, 1 - over)] - first[_at(some, 1 - over)]
                shift[_at(some, 1 - over)] = mean_away = away.mean(over, keepdim=True)
                squares = away.sub_(mean_away).square_().sum(over, keepdim=True)
                deviation[_at(some, 1 - over)] = squares.div_(count - 1).sqrt_()
            mean, deviation = (first + shift).squeeze(over), deviation.squeeze(over)
        ctx.save_for_backward(vectors, lengths, cosines, shift, deviation)
        ctx.over = over
        return lengths, cosines, mean, deviation

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_lengths: Tensor | None,
        of_cosines: Tensor | None,
        of_mean: Tensor | None,
        of_deviation: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        vectors, lengths, cosines, shift, deviation = ctx.saved_tensors
        over, move, stretch = ctx.over, None, None
        if of_mean is not None:
            move = (of_mean / vectors.shape[over]).unsqueeze(over)
        if of_deviation is not None:
            stretch = of_deviation / (deviation * (vectors.shape[over] - 1))
            stretch = stretch.masked_fill(deviation == 0, 0.0).unsqueeze(over)
        gradient = torch.empty_like(vectors)
        for some in pieces_of(vectors, 0):
            own, piece = vectors[some], gradient[some]
            if lengths is None or (of_lengths is None and of_cosines is None):
                piece.zero_()
            else:
                of_met = _of_met(
                    lengths[some],
                    cosines[some],
                    None if of_lengths is None else of_lengths[some],
                    None if of_cosines is None else of_cosines[some],
                )
                torch.bmm(of_met, own, out=piece)
            chosen = slice(None) if over == 0 else some
            if stretch is not None:
                away = (own - (vectors[:1] if over == 0 else own[:, :1])).sub_(shift[chosen])
                piece.addcmul_(away, stretch[chosen])
            if move is not None:
                piece.add_(move[chosen])
        return gradient, None, None


def _of_met(lengths: Tensor, cosines: Tensor, of_lengths: Tensor | None, of_cosines: Tensor | None) -> Tensor:
    """Return what times the increments (n, M, D) of some texts is their gradient.

    Args:
        lengths: (n, M).
        cosines: (n, M, M).
        of_lengths: (n, M) gradient of the lengths.
        of_cosines: (n, M, M) gradient of the cosines.

    Returns:
        (n, M, M), symmetric.
    """
    if of_cosines is None:
        both, of_length = torch.zeros_like(cosines), torch.zeros_like(lengths)
    else:
        both = of_cosines + of_cosines.transpose(1, 2)
        of_length = -(both * cosines).sum(2) / lengths  # a longer increment has smaller cosines
        both.div_(lengths.unsqueeze(1)).div_(lengths.unsqueeze(2))
    if of_lengths is not None:
        of_length = of_length + of_lengths
    both.diagonal(dim1=1, dim2=2).add_(of_length / lengths * (lengths > COSINE_EPS))
    return both


def _at(some: slice, axis: int) -> tuple[slice, ...]:
    """Return the index of some items of an axis, 0 or 1."""
    return (slice(None),) * axis + (some,)
