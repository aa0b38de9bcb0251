"""What one side of a pair owns: coefficients over its vectors, with what waits to be applied to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.pairwise.once import once


class Side:
    """Coefficients over the vectors that one side of a pair owns.

    Args:
        coefficients: (M, K, N, Q); None where slot q simply is basis vector q (then K is Q, or 1 for every slot).
        vectors: (M, K, D) of each video, (N, K, D) of each text, or (K, D) where all pairs share it: the basis, or
            what becomes the basis by `pending`.
        factor: (M, N, Q), what all coefficients of a vector are multiplied by besides. It waits here, because a product
            has one number per pair to multiply with it where the coefficients have K.
        origin: names what the basis was made of and how, for `once`; None where it need not be kept.
        pending: (D, D) matrix, or (D,) its diagonal, that is still to be applied to `vectors`. Where these are more
            than D, to scale, to centre and to add are done to the matrix, which is smaller.

    Example:
        >>> frames = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # M 1, K 2, D 2
        >>> Side(torch.ones(1, 2, 1, 1), frames, pending=torch.tensor([2.0, 3.0])).basis
        tensor([[[2., 0.],
                 [0., 3.]]])
    """

    def __init__(
        self,
        coefficients: Tensor | None,
        vectors: Tensor,
        factor: Tensor | None = None,
        origin: tuple[Hashable, ...] | None = None,
        pending: Tensor | None = None,
    ) -> None:
        self.coefficients, self.vectors, self.factor = coefficients, vectors, factor
        self.origin, self.pending = origin, pending
        self._basis = vectors if pending is None else None
        self._met: list[tuple[Tensor, Tensor]] = []

    @property
    def basis(self) -> Tensor:
        """The vectors of the basis, of the shape of `vectors`."""
        if self._basis is None:
            assert self.pending is not None
            diagonal = self.pending.ndim == 1
            self._basis = self.vectors * self.pending if diagonal else F.linear(self.vectors, self.pending)
        return self._basis

    @property
    def single(self) -> bool:
        """Whether every slot is the one vector of the basis, besides the factor."""
        return self.coefficients is None and self.vectors.shape[-2] == 1

    @property
    def many(self) -> bool:
        """Whether there are more vectors than a matrix has rows, none of which `once` keeps."""
        return self.origin is None and self.vectors.shape[:-1].numel() > self.vectors.shape[-1]

    def centred(self) -> Side:
        """Return the side with the mean over D taken off every vector of the basis."""
        if self.many and self.pending is not None and self.pending.ndim == 2:
            return self._waiting(self.vectors, self.pending - self.pending.mean(0))
        return self.mapped("centred", lambda basis: basis - basis.mean(-1, keepdim=True))

    def times(self, key: Hashable, weight: Tensor) -> Side:
        """Return the side with every vector of the basis times `weight` (D,), element by element."""
        if self.many:
            return self._waiting(self.basis, weight)
        return self.mapped((key, "times"), lambda basis: basis * weight)

    def linear(self, key: Hashable, weight: Tensor) -> Side:
        """Return the side with the matrix `weight` (D, D) applied to the basis."""
        if not self.many:
            return self.mapped((key, "linear"), lambda basis: F.linear(basis, weight))
        if self.pending is not None and self.pending.ndim == 1:
            return self._waiting(self.vectors, weight * self.pending)
        return self._waiting(self.basis, weight)

    def plus(self, other: Side) -> Side:
        """Return the sum with a side of the same coefficients and the same factor."""
        if self.vectors is other.vectors and self.many and self.pending is not None and other.pending is not None:
            ranks = self.pending.ndim, other.pending.ndim
            maps = [
                torch.diag(side.pending) if rank < max(ranks) and side.pending is not None else side.pending
                for side, rank in zip((self, other), ranks, strict=True)
            ]
            assert maps[0] is not None
            assert maps[1] is not None
            return self._waiting(self.vectors, maps[0] + maps[1])
        return Side(self.coefficients, self.basis + other.basis, self.factor)

    def mapped(self, key: Hashable, function: Callable[[Tensor], Tensor]) -> Side:
        """Return the side with `function` of its basis, which is computed once per call where the key says so."""
        origin = None if self.origin is None else (*self.origin, key)
        return Side(self.coefficients, once(origin, lambda: function(self.basis)), self.factor, origin)

    def _waiting(self, vectors: Tensor, pending: Tensor) -> Side:
        return Side(self.coefficients, vectors, self.factor, None, pending)

    def scaled(self, factor: Tensor) -> Side:
        """Return the side times a number per vector, `factor` (M, N, Q)."""
        return self.with_factor(factor if self.factor is None else self.factor * factor)

    def with_factor(self, factor: Tensor | None) -> Side:
        """Return the side with another factor."""
        side = Side(self.coefficients, self.vectors, factor, self.origin, self.pending)
        side._basis, side._met = self._basis, self._met
        return side

    def with_frames(self, vectors: Tensor) -> Tensor:
        """Return products (M, F, N, L) of a basis of texts with `vectors` (M, F, D).

        They are kept as long as the side: a cosine with a mix of frames asks for what its weights were made of.
        """
        for met, products in self._met:
            if met is vectors:
                return products
        products = F.linear(vectors.flatten(0, 1), self.basis.flatten(0, 1))
        products = products.view(*vectors.shape[:2], *self.basis.shape[:2])
        if self.single:
            self._met.append((vectors, products))
        return products


class Sides(NamedTuple):
    """What pair vectors are made of, besides an offset.

    Attributes:
        video: coefficients and basis (M, K, D) of the videos.
        text: coefficients and basis (N, L, D) of the texts.
        shared: coefficients and basis (S, D) of what belongs to neither, such as a bias behind a LayerNorm.
    """

    video: Side | None = None
    text: Side | None = None
    shared: Side | None = None

    def map(self, function: Callable[[Side], Side]) -> Sides:
        """Return `function` of every side that is there."""
        return Sides(*(None if side is None else function(side) for side in self))
