"""Terms of factorized pair vectors: coefficients over the vectors of one side, with pending operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class BasisTerm:
    """Coefficients over the vectors of one side of a pair.

    Args:
        coefficients: (M, K, N, Q); None if slot q is basis vector q (then K is Q, or 1 for every slot).
        vectors: (M, K, D) of each video, (N, K, D) of each text, or (K, D) shared by all pairs: the basis, or the
            vectors that give the basis after `pending`.
        factor: (M, N, Q) factor of all coefficients of a vector. It is kept separately, because a product has one
            value per pair to multiply, but K coefficients.
        pending: (D, D) matrix, or (D,) diagonal of one, that is still to be applied to `vectors`. If there are more
            than D vectors, scaling, centering and adding are applied to the matrix, which is smaller.
    """

    def __init__(
        self,
        coefficients: Tensor | None,
        vectors: Tensor,
        factor: Tensor | None = None,
        pending: Tensor | None = None,
    ) -> None:
        self.coefficients, self.vectors, self.factor, self.pending = coefficients, vectors, factor, pending
        self._basis = vectors if pending is None else None
        self._met: list[tuple[Tensor, Tensor]] = []

    @property
    def basis(self) -> Tensor:
        """Return the basis, in the shape of `vectors`."""
        if self._basis is None:
            assert self.pending is not None
            diagonal = self.pending.ndim == 1
            self._basis = self.vectors * self.pending if diagonal else F.linear(self.vectors, self.pending)
        return self._basis

    @property
    def single(self) -> bool:
        """Return True if every slot is the only vector of the basis, apart from the factor."""
        return self.coefficients is None and self.vectors.shape[-2] == 1

    @property
    def many(self) -> bool:
        """Return True if there are more vectors than rows of a matrix."""
        return self.vectors.shape[:-1].numel() > self.vectors.shape[-1]

    def centered(self) -> BasisTerm:
        """Return the side with the mean over D subtracted from every vector of the basis."""
        if self.many and self.pending is not None and self.pending.ndim == 2:
            return self._waiting(self.vectors, self.pending - self.pending.mean(0))
        return self.mapped(lambda basis: basis - basis.mean(-1, keepdim=True))

    def times(self, weight: Tensor) -> BasisTerm:
        """Return the side with every vector of the basis times `weight` (D,), element by element."""
        if self.many:
            return self._waiting(self.basis, weight)
        return self.mapped(lambda basis: basis * weight)

    def linear(self, weight: Tensor) -> BasisTerm:
        """Return the side with the matrix `weight` (D, D) applied to the basis."""
        if not self.many:
            return self.mapped(lambda basis: F.linear(basis, weight))
        if self.pending is not None and self.pending.ndim == 1:
            return self._waiting(self.vectors, weight * self.pending)
        return self._waiting(self.basis, weight)

    def plus(self, other: BasisTerm) -> BasisTerm:
        """Return the sum with a side that has the same coefficients and the same factor."""
        if self.vectors is other.vectors and self.many and self.pending is not None and other.pending is not None:
            ranks = self.pending.ndim, other.pending.ndim
            maps = [
                torch.diag(side.pending) if rank < max(ranks) and side.pending is not None else side.pending
                for side, rank in zip((self, other), ranks, strict=True)
            ]
            assert maps[0] is not None
            assert maps[1] is not None
            return self._waiting(self.vectors, maps[0] + maps[1])
        return BasisTerm(self.coefficients, self.basis + other.basis, self.factor)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> BasisTerm:
        """Return the side with `function` of its basis."""
        return BasisTerm(self.coefficients, function(self.basis), self.factor)

    def _waiting(self, vectors: Tensor, pending: Tensor) -> BasisTerm:
        return BasisTerm(self.coefficients, vectors, self.factor, pending)

    def scaled(self, factor: Tensor) -> BasisTerm:
        """Return the side with every vector scaled by `factor` (M, N, Q)."""
        return self.with_factor(factor if self.factor is None else self.factor * factor)

    def with_factor(self, factor: Tensor | None) -> BasisTerm:
        """Return the side with another factor."""
        side = BasisTerm(self.coefficients, self.vectors, factor, self.pending)
        side._basis, side._met = self._basis, self._met
        return side

    def with_frames(self, vectors: Tensor) -> Tensor:
        """Return products (M, F, N, L) of a basis of texts with `vectors` (M, F, D).

        They are cached in the side, because a cosine with a mix of frames needs the products of its weights again.
        """
        for met, products in self._met:
            if met is vectors:
                return products
        products = F.linear(vectors.flatten(0, 1), self.basis.flatten(0, 1))
        products = products.view(*vectors.shape[:2], *self.basis.shape[:2])
        if self.single:
            self._met.append((vectors, products))
        return products


class BasisTerms(NamedTuple):
    """Terms of pair vectors, without the offset.

    Attributes:
        video: coefficients and basis (M, K, D) of the videos.
        text: coefficients and basis (N, L, D) of the texts.
        shared: coefficients and basis (S, D) of vectors of neither side, such as a bias after a LayerNorm.
    """

    video: BasisTerm | None = None
    text: BasisTerm | None = None
    shared: BasisTerm | None = None

    def map(self, function: Callable[[BasisTerm], BasisTerm]) -> BasisTerms:
        """Return the result of `function` for every existing side."""
        return BasisTerms(*(None if side is None else function(side) for side in self))
