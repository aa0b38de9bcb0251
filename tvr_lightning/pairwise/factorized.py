"""Pair vectors as coefficients over a small basis, for efficient scores of all pairs.

The attention output of a pair is a weighted sum of a few vectors that depend on the video only. A linear layer maps
this basis once per video. A LayerNorm centers it and adds one value per pair, because a variance is a quadratic form of
the coefficients in the small Gram matrix of the basis. Therefore no tensor with a D axis is created per pair.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.pairwise.base import Pairwise, at_least_float32, parameters_like, parameters_of, total
from tvr_lightning.pairwise.basis_terms import BasisTerm, BasisTerms
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.dropout_masks import dropout_mask
from tvr_lightning.pairwise.dropout_vectors import DroppedPairVectors, Summed
from tvr_lightning.pairwise.tiles import loops_are_fast


class PairVectors(Pairwise):
    """Vectors of all pairs, stored as coefficients over video vectors, text vectors and shared vectors.

    x[j, i, q] = sum_k c_video[j, k, i, q] B_video[j, k] + sum_l c_text[j, l, i, q] B_text[i, l]
                 + sum_s c_shared[j, s, i, q] B_shared[s] + offset

    Args:
        shape: (M, N, Q).
        terms: coefficients and bases.
        offset: (D,) vector added to all pairs.

    Raises:
        UserError: There are no terms.
    """

    def __init__(self, shape: tuple[int, int, int], terms: BasisTerms, offset: Tensor | None = None) -> None:
        like = next((term.basis for term in terms if term is not None), offset)
        if like is None:
            raise UserError("PairVectors need a basis of the videos, of the texts, a shared one, or an offset")
        self.videos, self.texts, self.slots = shape
        self.terms = terms
        self.offset = offset
        self._like = like

    @classmethod
    @override
    def from_texts(cls, vectors: Tensor, videos: int) -> PairVectors:
        vectors = at_least_float32(vectors)
        term = BasisTerm(_slots(vectors, videos, len(vectors)), vectors, of_texts=True)
        return cls((videos, *vectors.shape[:2]), BasisTerms(text=term))

    @classmethod
    @override
    def from_videos(cls, vectors: Tensor, texts: int) -> PairVectors:
        vectors = at_least_float32(vectors)
        term = BasisTerm(_slots(vectors, len(vectors), texts), vectors)
        return cls((len(vectors), texts, vectors.shape[1]), BasisTerms(video=term))

    @classmethod
    @override
    def mix(cls, weights: Tensor, basis: Tensor, side: Literal["video", "text"] = "video") -> PairVectors:
        term = BasisTerm(at_least_float32(weights), at_least_float32(basis), of_texts=side == "text")
        shape = (weights.shape[0], weights.shape[2], weights.shape[3])
        return cls(shape, BasisTerms(text=term) if side == "text" else BasisTerms(video=term))

    @override
    def linear(self, layer: nn.Linear | Tensor) -> PairVectors:
        weight, bias = parameters_of(layer, self._like.dtype)
        terms = self.terms.map(lambda term: term.mapped(lambda basis: F.linear(basis, weight)))
        offset = None if self.offset is None else F.linear(self.offset, weight)
        if bias is not None:
            offset = bias if offset is None else offset + bias
        return PairVectors(self.shape, terms, offset)

    @override
    def layer_norm(self, layer: nn.LayerNorm) -> PairVectors:
        terms = self.terms.map(lambda term: term.mapped(lambda basis: basis - basis.mean(-1, keepdim=True)))
        offset = None if self.offset is None else self.offset - self.offset.mean()
        middle = PairVectors(self.shape, terms, offset)
        variance = middle.inner(middle).clamp(min=0) / self._like.shape[-1]
        weight, bias = parameters_like(layer, variance)
        terms = terms.map(lambda term: term.mapped(lambda basis: basis * weight))
        scaled = PairVectors(self.shape, terms, None if offset is None else offset * weight)
        scaled = scaled.scale((variance + layer.eps).rsqrt())
        return PairVectors(self.shape, scaled.terms, bias)

    @override
    def dropout(self, probability: float) -> Pairwise:
        if not probability:
            return self
        if self.terms.text is not None:
            return DensePairVectors(self.vectors).dropout(probability)
        summed = self._summed()
        mask, scale = dropout_mask((*self.shape, summed.basis.shape[-1]), probability, summed.basis.device)
        return DroppedPairVectors(summed._replace(basis=summed.basis * scale), mask)

    def _summed(self, alike: Summed | None = None) -> Summed:
        """Return the terms of videos and the shared terms as sums over bases of the videos.

        Args:
            alike: Sums to reuse the coefficients of, if they are the same.
        """
        terms = [term for term in self._all_terms() if not term.of_texts]
        basis = torch.cat([term.basis.expand(self.videos, -1, -1) for term in terms], dim=1)
        of = [tensor for term in self.terms if term is not None for tensor in (term.coefficients, term.factor)]
        if alike is not None and alike.basis.shape == basis.shape and [*map(id, of)] == [*map(id, alike.of)]:
            return Summed(alike.coefficients, basis, of)
        return Summed(torch.cat([self._full(term) for term in terms], dim=1), basis, of)

    @property
    def _only_texts(self) -> bool:
        return self.terms.video is None and self.terms.shared is None and self.offset is None

    @property
    @override
    def vectors(self) -> Tensor:
        # K D multiplications each
        parts = []
        text = self.terms.text
        if not self._only_texts:
            parts.append(self._summed().mixed().unflatten(1, self.shape[1:]))
        if text is not None and text.coefficients is None and text.factor is None:
            parts.append(text.basis.expand(self.videos, -1, self.slots, -1))
        elif text is not None:
            parts.append(torch.einsum("mknq,nkd->mnqd", self._full(text), text.basis))
        return total(parts)

    @override
    def __add__(self, other: Pairwise) -> Pairwise:
        of_videos = self.terms.text is None and self.shape == other.shape
        if isinstance(other, DroppedPairVectors) and other.open and of_videos:
            return DroppedPairVectors(other.dropped, other.staying, self._summed(other.dropped))
        if isinstance(other, PairVectors):
            return self._combined(other)
        return DensePairVectors(self.vectors + other.vectors)

    @override
    def __sub__(self, other: Pairwise) -> Pairwise:
        if not isinstance(other, PairVectors):
            return DensePairVectors(self.vectors - other.vectors)
        terms = other.terms.map(lambda term: term.mapped(torch.neg))
        return self._combined(PairVectors(other.shape, terms, None if other.offset is None else -other.offset))

    @override
    def scale(self, factor: Tensor) -> PairVectors:
        factor = factor.to(self._like.dtype)
        shared = self._with_offset()
        if shared is not None:  # one or two vectors: coefficients of the factor's size
            shared = BasisTerm(shared.full() * factor.unsqueeze(1), shared.basis)
        video, text = (None if term is None else term.scaled(factor) for term in self.terms[:2])
        return PairVectors(self.shape, BasisTerms(video, text, shared))

    @override
    def __getitem__(self, index: tuple[slice, slice, slice]) -> PairVectors:
        videos, texts, slots = index

        def chosen(term: BasisTerm | None, rows: slice) -> BasisTerm | None:
            if term is None:
                return None
            coefficients = term.coefficients
            factor = term.factor
            if coefficients is not None:
                coefficients = coefficients.expand(self.videos, -1, *self.shape[1:])[videos, :, texts, slots]
            if factor is not None:
                factor = factor.expand(self.shape)[index]
            return BasisTerm(coefficients, term.basis[rows], factor, term.of_texts)

        pairs = zip(self.terms, (videos, texts, slice(None)), strict=True)
        terms = BasisTerms(*(chosen(*pair) for pair in pairs))
        sizes = zip(self.shape, index, strict=True)  # symbols in an export, which have no range
        shape = [count if some == slice(None) else len(range(count)[some]) for count, some in sizes]
        return PairVectors((shape[0], shape[1], shape[2]), terms, self.offset)

    @override
    def joined(self) -> PairVectors:
        if self._only_texts:
            return self
        summed = self._summed()
        return PairVectors(self.shape, BasisTerms(BasisTerm(summed.coefficients, summed.basis), self.terms.text))

    @override
    def dot(self, vectors: Tensor) -> Tensor:
        vectors = vectors.to(self._like.dtype)
        video, text, _ = self.terms
        shared = self._with_offset()
        count = vectors.shape[1]
        if count == 1:
            return self.inner(PairVectors.from_texts(vectors, self.videos)).unsqueeze(2)
        parts: list[Tensor] = []
        if text is not None:
            products = text.dot(vectors)
            parts.append(products if text.factor is None else products * text.factor.unsqueeze(2))
        if self.slots == 1 and video is not None and video.coefficients is not None and count > 2:
            # Computing the single vector of a pair costs 2 D (K + T), and K T products cost 2 D K T.
            own = self._summed().mixed()  # (M, N, D)
            parts.append((vectors @ own.permute(1, 2, 0)).permute(2, 0, 1).unsqueeze(-1))
        elif not self._only_texts:
            parts.append(self._video_products(vectors, [term for term in (video, shared) if term is not None]))
        return total(parts).expand(self.videos, self.texts, count, self.slots)

    def _video_products(self, vectors: Tensor, terms: list[BasisTerm]) -> Tensor:
        """Return products (M, N, T, Q) of terms of the videos and shared terms with `vectors` (N, T, D).

        On a CPU, they are computed per video, because a single product would first copy the coefficients to make the
        axes (M, N) adjacent. On other devices, this costs less than an operation per video.
        """
        # One product for all terms: a separate product with a few shared vectors would read all of `vectors` again.
        products = F.linear(torch.cat([term.basis.flatten(0, 1) for term in terms]), vectors.flatten(0, 1))
        found = products.view(-1, *vectors.shape[:2]).split([term.basis.shape[:2].numel() for term in terms])
        rows = [
            each.view(*term.basis.shape[:2], *each.shape[1:]).expand(self.videos, -1, -1, -1)
            for each, term in zip(found, terms, strict=True)
        ]  # (M, K, N, T) each
        if torch.is_grad_enabled() or not loops_are_fast(vectors.device):
            return torch.cat(rows, dim=1).permute(0, 2, 3, 1) @ self._summed().coefficients.permute(0, 2, 1, 3)
        result = vectors.new_empty(self.videos, *vectors.shape[:2], self.slots)
        for j in range(self.videos):
            coefficients = self[j : j + 1, :, :]._summed().coefficients[0]
            products = torch.cat([each[j] for each in rows])
            torch.bmm(products.permute(1, 2, 0), coefficients.permute(1, 0, 2), out=result[j])
        return result

    @override
    def dot_frames(self, vectors: Tensor) -> Tensor:
        vectors = vectors.to(self._like.dtype)
        found = [(term.dot_frames(vectors), term.factor) for term in self._all_terms()]
        if len(found) > 1 and found[0][1] is found[1][1]:
            found[:2] = [(found[0][0] + found[1][0], found[0][1])]
        values = [value if factor is None else value * factor.unsqueeze(1) for value, factor in found]
        return total(values).expand(self.videos, vectors.shape[1], self.texts, self.slots)

    @override
    def inner(self, other: Pairwise) -> Tensor:
        parts: list[Tensor] = []
        if isinstance(other, PairVectors):
            mine = self._all_terms()
            theirs = other._all_terms()
            for a, first in enumerate(mine):
                for b, second in enumerate(theirs):
                    if self is not other or b == a:
                        parts.append(first.inner(second))
                    elif b > a:  # counts for its mirror image
                        parts.append(2 * first.inner(second))
        else:  # from the products of its elements with the basis
            if not self._only_texts:
                summed = self._summed()
                parts.append((other.dot_frames(summed.basis) * summed.coefficients).sum(1))
            if self.terms.text is not None:
                products = other.dot(self.terms.text.basis).transpose(1, 2)
                parts.append((products * self._full(self.terms.text)).sum(1))
        return total(parts).expand(self.videos, self.texts, max(self.slots, other.slots))

    @override
    def _stored(self) -> int:
        counts = [term.basis.shape[:-1].numel() for term in self.terms if term is not None]
        return sum(counts) + (self.offset is not None)

    def _full(self, term: BasisTerm) -> Tensor:
        """Return the coefficients of a term times the factor, as (M, K, N, Q)."""
        return term.full().expand(self.videos, -1, *self.shape[1:])

    def _with_offset(self) -> BasisTerm | None:
        """Return the shared term with the offset as one more vector with coefficient 1."""
        if self.offset is None:
            return self.terms.shared
        return self._joined(self.terms.shared, BasisTerm(None, self.offset.view(1, 1, -1)), self.slots)

    def _all_terms(self) -> list[BasisTerm]:
        return [term for term in (*self.terms[:2], self._with_offset()) if term is not None]

    def _combined(self, other: PairVectors) -> PairVectors:
        slots = max(self.slots, other.slots)
        if {self.slots, other.slots} - {1, slots} or self.shape[:2] != other.shape[:2]:
            raise UserError(f"pair vectors of shapes (M, N, Q) {self.shape} and {other.shape} cannot be combined")
        pairs = zip(self.terms, other.terms, strict=True)
        terms = BasisTerms(*(self._joined(mine, theirs, slots) for mine, theirs in pairs))
        offset = other.offset
        if self.offset is not None:
            offset = self.offset if offset is None else self.offset + offset
        return PairVectors((self.videos, self.texts, slots), terms, offset)

    def _joined(self, first: BasisTerm | None, second: BasisTerm | None, slots: int) -> BasisTerm | None:
        """Return the sum of two terms; those with the same coefficients have a basis of the same size."""
        if first is None or second is None:
            return second if first is None else first
        alike = first.coefficients is second.coefficients and first.factor is second.factor
        if alike and first.basis.shape == second.basis.shape:
            return first.mapped(lambda basis: basis + second.basis)
        both = [term.full().expand(self.videos, -1, self.texts, slots) for term in (first, second)]
        basis = torch.cat([first.basis, second.basis], dim=1)
        return BasisTerm(torch.cat(both, dim=1), basis, of_texts=first.of_texts)


def _slots(vectors: Tensor, videos: int, texts: int) -> Tensor | None:
    """Return coefficients (M, Q, N, Q) that make vector q the one of slot q; None for a single slot."""
    count = vectors.shape[1]
    if count == 1:
        return None
    return torch.eye(count, dtype=vectors.dtype, device=vectors.device)[:, None].expand(videos, -1, texts, -1)
