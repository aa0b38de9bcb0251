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
        over: Axis of at least 2 items for means and deviations: 0 for texts, 1 for videos.

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

    def __init__(self, vectors: Tensor, over: int = 0) -> None:
        self.lengths, self.cosines, self.mean, self.deviation = _Measured.apply(vectors, over)

    @classmethod
    def of(cls, vectors: Tensor | Increments, over: int = 0) -> Increments:
        """Return the statistics of increments, or increments that already have them unchanged."""
        return vectors if isinstance(vectors, Increments) else cls(vectors, over)


class _Measured(torch.autograd.Function):
    """Lengths (N, M), cosines (N, M, M), means and deviations (M or N, D)."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, over: int) -> tuple[Tensor, ...]:
        cosines = torch.bmm(vectors, vectors.transpose(1, 2))
        lengths = cosines.diagonal(dim1=1, dim2=2).clamp(min=COSINE_EPS**2).sqrt()
        for some in tiles_of(cosines, 0):
            cosines[some].div_(lengths[some].unsqueeze(1)).div_(lengths[some].unsqueeze(2))
        # The increments of an anchor can be almost equal. Deviations from their mean, and especially gradients, would
        # then be its rounding error. Differences from the first increment are exact in float32.
        first = vectors.narrow(over, 0, 1)
        shift, deviation = torch.empty_like(first), torch.empty_like(first)
        for some in tiles_of(vectors, 1 - over):
            at = (slice(None),) * (1 - over) + (some,)
            away = vectors[at] - first[at]
            shift[at] = mean_away = away.mean(over, keepdim=True)
            squares = away.sub_(mean_away).square_().sum(over, keepdim=True)
            deviation[at] = squares.div_(vectors.shape[over] - 1).sqrt_()
        mean, deviation = (first + shift).squeeze(over), deviation.squeeze(over)
        ctx.save_for_backward(vectors, lengths, cosines, shift, deviation)
        ctx.over = over
        return lengths, cosines, mean, deviation

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_lengths: Tensor, of_cosines: Tensor, of_mean: Tensor, of_deviation: Tensor
    ) -> tuple[Tensor, None]:
        vectors, lengths, cosines, shift, deviation = ctx.saved_tensors
        over, count = ctx.over, vectors.shape[ctx.over]
        move = (of_mean / count).unsqueeze(over)
        stretch = of_deviation / (deviation * (count - 1))
        stretch = stretch.masked_fill(~(deviation > 0), 0.0).unsqueeze(over)
        gradient = torch.empty_like(vectors)
        for some in tiles_of(vectors, 0):
            own, piece, length = vectors[some], gradient[some], lengths[some]
            # Symmetric (n, M, M), whose product with the increments is their gradient through lengths and cosines.
            both = of_cosines[some] + of_cosines[some].transpose(1, 2)
            of_length = of_lengths[some] - (both * cosines[some]).sum(2) / length  # a longer one has smaller cosines
            both.div_(length.unsqueeze(1)).div_(length.unsqueeze(2))
            both.diagonal(dim1=1, dim2=2).add_(of_length / length * (length > COSINE_EPS))
            torch.bmm(both, own, out=piece)
            chosen = slice(None) if over == 0 else some
            away = (own - (vectors[:1] if over == 0 else own[:, :1])).sub_(shift[chosen])
            piece.addcmul_(away, stretch[chosen]).add_(move[chosen])
        return gradient, None
