"""Terms of factorized pair vectors: coefficients over the vectors of one side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(eq=False)
class BasisTerm:
    """Coefficients over the vectors of one side of a pair.

    Attributes:
        coefficients: (M, K, N, Q); None for a single vector with coefficient 1.
        basis: (M, K, D) of each video, (1, K, D) shared by all pairs, or (N, K, D) of each text.
        factor: (M, N, Q) factor of all coefficients of a vector. It is kept separately, because a product has one
            value per pair to multiply, but K coefficients.
        of_texts: True for a basis of texts.
        met: products of the only vector of each text with vectors of videos, and these vectors. A cosine with a mix of
            frames needs the products of its weights again.
    """

    coefficients: Tensor | None
    basis: Tensor
    factor: Tensor | None = None
    of_texts: bool = False
    met: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> BasisTerm:
        """Return the term with `function` of its basis."""
        return replace(self, basis=function(self.basis), met=[])

    def scaled(self, factor: Tensor) -> BasisTerm:
        """Return the term with every vector scaled by `factor` (M, N, Q)."""
        return replace(self, factor=factor if self.factor is None else self.factor * factor)

    def full(self) -> Tensor:
        """Return the coefficients times the factor, in a shape that broadcasts to (M, K, N, Q)."""
        if self.factor is None:
            return self.basis.new_ones(1, 1, 1, 1) if self.coefficients is None else self.coefficients
        factor = self.factor.unsqueeze(1)
        return factor if self.coefficients is None else self.coefficients * factor

    def weighted(self, values: Tensor, fresh: bool = False) -> Tensor:
        """Return the sum over K of `values` times coefficients (M, K, N, Q) without the factor, as (M, N, Q).

        `fresh` values may be overwritten.
        """
        if self.coefficients is None:
            return values[:, 0]
        whole = values.shape == torch.broadcast_shapes(values.shape, self.coefficients.shape)
        if fresh and whole and not torch.is_grad_enabled():
            return values.mul_(self.coefficients).sum(1)
        return (values * self.coefficients).sum(1)

    def dot(self, vectors: Tensor) -> Tensor:
        """Return products of texts' vectors with `vectors` (N, T, D), without the factor, as (M or 1, N, T, Q)."""
        products = vectors @ self.basis.mT  # (N, T, K)
        if self.coefficients is None:
            return products.unsqueeze(0)
        return torch.einsum("ntk,mknq->mntq", products, self.coefficients)

    def dot_frames(self, vectors: Tensor) -> Tensor:
        """Return products with `vectors` (M or 1, F, D), without the factor, as (M or 1, F, N or 1, Q or 1)."""
        if self.of_texts:
            products = self._with_frames(vectors)  # (M, F, N, K)
            if self.coefficients is None:
                return products
            return torch.einsum("mfnk,mknq->mfnq", products, self.coefficients)
        products = vectors @ self.basis.mT  # (M, F, K)
        if self.coefficients is None:
            return products.unsqueeze(2)
        return (products @ self.coefficients.flatten(2)).unflatten(2, self.coefficients.shape[2:])

    def _with_frames(self, vectors: Tensor) -> Tensor:
        for met, products in self.met:
            if met is vectors:
                return products
        products = F.linear(vectors.flatten(0, 1), self.basis.flatten(0, 1))
        products = products.view(*vectors.shape[:2], *self.basis.shape[:2])
        if self.coefficients is None:
            self.met.append((vectors, products))
        return products

    def inner(self, other: BasisTerm) -> Tensor:
        """Return inner products with the vectors of another term, in a shape that broadcasts to (M, N, Q)."""
        first, second = self, other
        if (second.of_texts, second.basis.shape[1]) > (first.of_texts, first.basis.shape[1]):
            first, second = second, first  # products with as few vectors as possible, and of texts with videos
        products = first.dot(second.basis).transpose(1, 2) if second.of_texts else first.dot_frames(second.basis)
        value = second.weighted(products, fresh=not first.of_texts)
        for term in (self, other):
            value = value if term.factor is None else value * term.factor
        return value


class BasisTerms(NamedTuple):
    """Terms of pair vectors, without the offset.

    Attributes:
        video: coefficients and basis (M, K, D) of the videos.
        text: coefficients and basis (N, K, D) of the texts.
        shared: coefficients and basis (1, K, D) of vectors of neither side, such as a bias after a LayerNorm.
    """

    video: BasisTerm | None = None
    text: BasisTerm | None = None
    shared: BasisTerm | None = None

    def map(self, function: Callable[[BasisTerm], BasisTerm]) -> BasisTerms:
        """Return the result of `function` for every existing term."""
        return BasisTerms(*(None if term is None else function(term) for term in self))
