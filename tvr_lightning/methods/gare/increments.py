"""Statistics of the increments of all pairs that GARE's losses use, computed in cache-sized tiles.

With separate operators, products, means, and deviations would each read all increments, and each would write a gradient
of that size. Here, one backward pass writes one gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tvr_lightning.layers.cosine import COSINE_EPS
from tvr_lightning.pairwise.tiles import tiles_of


class Increments:
    """Increments of all pairs and their statistics.

    Args:
        vectors: Increments (N, M, D).
        over: Axis of at least 2 items for means and deviations: 0 for texts, 1 for videos, None for neither.
        products: Whether to compute lengths and cosines.

    Attributes:
        lengths: Lengths (N, M).
        cosines: Cosines (N, M, M) between the increments of a text.
        mean: Mean (M, D) over the texts, or (N, D) over the videos.
        deviation: Unbiased standard deviation, of the same shape.

    Example:
        >>> found = Increments(torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), over=1)  # N 1, M 2, D 2
        >>> found.lengths, found.cosines[0, 0], found.mean
        (tensor([[5., 2.]]), tensor([1.0000, 0.8000]), tensor([[1.5000, 3.0000]]))
    """

    def __init__(self, vectors: Tensor, over: int | None = None, products: bool = True) -> None:
        self.lengths, self.cosines, self.mean, self.deviation = _Measured.apply(vectors, over, products)

    @classmethod
    def of(cls, vectors: Tensor | Increments, over: int | None = None, products: bool = True) -> Increments:
        """Return the statistics of increments, or increments that already have them unchanged."""
        return vectors if isinstance(vectors, Increments) else cls(vectors, over, products)


class _Measured(torch.autograd.Function):
    """Lengths (N, M), cosines (N, M, M), means and deviations, each None if not requested."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, over: int | None, products: bool) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        lengths = cosines = None
        if products:
            cosines = torch.bmm(vectors, vectors.transpose(1, 2))
            lengths = cosines.diagonal(dim1=1, dim2=2).clamp(min=COSINE_EPS**2).sqrt()
            for some in tiles_of(cosines, 0):
                cosines[some].div_(lengths[some].unsqueeze(1)).div_(lengths[some].unsqueeze(2))
        mean = deviation = shift = None
        if over is not None:
            # The increments of an anchor can be almost equal. Deviations from their mean, and especially gradients,
            # would then be its rounding error. Differences from the first increment are exact in float32.
            first, count = vectors.narrow(over, 0, 1), vectors.shape[over]
            shift, deviation = torch.empty_like(first), torch.empty_like(first)
            for some in tiles_of(vectors, 1 - over):
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
        for some in tiles_of(vectors, 0):
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
    """Return symmetric (n, M, M), whose product with the increments of n texts is their gradient."""
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
    """Return an index of items on axis 0 or 1."""
    return (slice(None),) * axis + (some,)
