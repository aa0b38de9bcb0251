"""Pair vectors as coefficients over a small basis, for efficient scores of all pairs.

The attention output of a pair is a weighted sum of a few vectors that depend on the video only. A linear layer maps
this basis once per video. A LayerNorm centers it and adds one value per pair, because a variance is a quadratic form of
the coefficients in the small Gram matrix of the basis. Therefore no tensor with a D axis is created per pair.
"""

from __future__ import annotations

from collections.abc import Callable
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
        like = next((side.vectors for side in terms if side is not None), offset)
        if like is None:
            raise UserError("PairVectors need a basis of the videos, of the texts, a shared one, or an offset")
        self.videos, self.texts, self.slots = shape
        self.terms = terms
        self.offset = offset
        self._like = like

    @classmethod
    @override
    def from_texts(cls, vectors: Tensor, videos: int) -> PairVectors:
        side = BasisTerm(None, at_least_float32(vectors))
        return cls((videos, len(vectors), vectors.shape[1]), BasisTerms(text=side))

    @classmethod
    @override
    def from_videos(cls, vectors: Tensor, texts: int) -> PairVectors:
        side = BasisTerm(None, at_least_float32(vectors))
        return cls((len(vectors), texts, vectors.shape[1]), BasisTerms(video=side))

    @classmethod
    @override
    def mix(cls, weights: Tensor, basis: Tensor, side: Literal["video", "text"] = "video") -> PairVectors:
        part = BasisTerm(at_least_float32(weights), at_least_float32(basis))
        shape = (weights.shape[0], weights.shape[2], weights.shape[3])
        return cls(shape, BasisTerms(video=part) if side == "video" else BasisTerms(text=part))

    @override
    def linear(self, layer: nn.Linear | Tensor) -> PairVectors:
        weight, bias = parameters_of(layer, self._dtype)
        terms = self.terms.map(lambda side: side.linear(weight))
        offset = None if self.offset is None else F.linear(self.offset, weight)
        if bias is not None:
            offset = bias if offset is None else offset + bias
        return PairVectors(self.shape, terms, offset)

    @override
    def layer_norm(self, layer: nn.LayerNorm) -> PairVectors:
        terms = self.terms.map(BasisTerm.centered)
        offset = None if self.offset is None else self.offset - self.offset.mean()
        middle = PairVectors(self.shape, terms, offset)
        variance = middle.inner(middle).clamp(min=0) / self._like.shape[-1]
        weight, bias = parameters_like(layer, variance)
        terms = terms.map(lambda side: side.times(weight))
        scaled = PairVectors(self.shape, terms, None if offset is None else offset * weight)
        scaled = scaled.scale((variance + layer.eps).rsqrt())
        return PairVectors(self.shape, scaled.terms, bias)

    @override
    def dropout(self, probability: float) -> Pairwise:
        if not probability:
            return self
        if self.terms.text is not None:
            return self.dense().dropout(probability)
        summed = self._summed()
        mask, scale = dropout_mask((*self.shape, summed.basis.shape[-1]), probability, summed.basis.device)
        return DroppedPairVectors(summed._replace(basis=summed.basis * scale), mask)

    def _summed(self, alike: Summed | None = None) -> Summed:
        """Return the terms of videos and the shared terms as sums over bases of the videos.

        Args:
            alike: Sums to reuse the coefficients of, if they are the same.
        """
        terms = [term for term, kind in self._all_terms() if kind != "text"]
        basis = torch.cat([term.basis.expand(self.videos, -1, -1) for term in terms], dim=1)
        of = [tensor for term in self.terms if term is not None for tensor in (term.coefficients, term.factor)]
        if alike is not None and alike.basis.shape == basis.shape and [*map(id, of)] == [*map(id, alike.of)]:
            return Summed(alike.coefficients, basis, of)
        return Summed(torch.cat([self._full(term) for term in terms], dim=1), basis, of)

    @property
    def _only_texts(self) -> bool:
        return self.terms.video is None and self.terms.shared is None and self.offset is None

    @override
    def dense(self) -> DensePairVectors:
        """Return the vectors in element form, with K D multiplications each."""
        terms, text = [], self.terms.text
        if not self._only_texts:
            mixed = self._summed().mixed(slice(None), slice(None))
            terms.append(mixed.unflatten(1, (self.texts, self.slots)))
        if text is not None and text.coefficients is None and text.factor is None:
            terms.append(text.basis.expand(self.videos, -1, self.slots, -1))
        elif text is not None:
            terms.append(torch.einsum("mknq,nkd->mnqd", self._full(text), text.basis))
        return DensePairVectors(total(terms))

    @override
    def __add__(self, other: Pairwise) -> Pairwise:
        of_videos = self.terms.text is None and self.shape == other.shape
        if isinstance(other, DroppedPairVectors) and other.open and of_videos:
            return DroppedPairVectors(other.dropped, other.staying, self._summed(other.dropped))
        if isinstance(other, DensePairVectors):
            return self.dense() + other
        assert isinstance(other, PairVectors)
        return self._combined(other)

    @override
    def __sub__(self, other: Pairwise) -> Pairwise:
        if not isinstance(other, PairVectors):
            return self.dense() - other
        terms = other.terms.map(lambda side: side.mapped(torch.neg))
        return self._combined(PairVectors(other.shape, terms, None if other.offset is None else -other.offset))

    @override
    def scale(self, factor: Tensor) -> PairVectors:
        factor, common = factor.to(self._dtype), self._with_offset()
        if common is not None:  # one or two vectors: coefficients of the factor's size
            common = BasisTerm(self._full(common) * factor.unsqueeze(1), common.basis)
        video, text = (None if side is None else side.scaled(factor) for side in self.terms[:2])
        return PairVectors(self.shape, BasisTerms(video, text, common))

    @override
    def select(self, start: int, stop: int) -> PairVectors:

        def chosen(side: BasisTerm) -> BasisTerm:
            factor = None if side.factor is None else side.factor.expand(*self.shape)[..., start:stop]
            if side.coefficients is not None:
                coefficients = side.coefficients.expand(-1, -1, -1, self.slots)[..., start:stop]
                return BasisTerm(coefficients, side.basis, factor)
            return side.with_factor(factor) if side.single else BasisTerm(None, side.basis[:, start:stop], factor)

        slots = len(range(*slice(start, stop).indices(self.slots)))
        return PairVectors((self.videos, self.texts, slots), self.terms.map(chosen), self.offset)

    @override
    def dot(self, vectors: Tensor) -> Tensor:
        vectors = vectors.to(self._dtype)
        terms: list[Tensor] = []
        text, video, common = self.terms.text, self.terms.video, self._with_offset()
        if text is not None:
            products = vectors @ text.basis.transpose(1, 2)  # (N, T, L)
            if text.coefficients is not None:
                terms.append(torch.einsum("ntl,mlnq->mntq", products, self._full(text)))
            else:
                terms.append(products if text.factor is None else products * text.factor.unsqueeze(2))
        if video is not None and video.coefficients is None:
            products = torch.einsum("mkd,ntd->mntk", video.basis, vectors)
            terms.append(products if video.factor is None else products * video.factor.unsqueeze(2))
        elif video is not None:
            terms.append(self._video_products(video, vectors, common))
            common = None
        if common is not None:
            shared = torch.einsum("sd,ntd->snt", common.basis, vectors)
            terms.append(torch.einsum("snt,msnq->mntq", shared, self._full(common)))
        return total(terms).expand(self.videos, self.texts, vectors.shape[1], self.slots)

    def _video_products(self, video: BasisTerm, vectors: Tensor, common: BasisTerm | None) -> Tensor:
        """Return products (M, N, T, Q) of the video term and the shared term with `vectors` (N, T, D)."""
        coefficients = video.coefficients
        assert coefficients is not None  # checked by the caller
        count = vectors.shape[1]
        if self.slots == 1 and count > 2:
            # Computing the single vector of a pair costs 2 D (K + T), and K T products cost 2 D K T.
            basis, coefficients = video.basis, self._full(video)
            if common is not None:
                basis = torch.cat([basis, common.basis.expand(self.videos, -1, -1)], dim=1)
                coefficients = torch.cat([coefficients, self._full(common)], dim=1)
            own = coefficients[..., 0].transpose(1, 2) @ basis  # (M, N, D)
            return (vectors @ own.permute(1, 2, 0)).permute(2, 0, 1).unsqueeze(-1)
        # One product for both: a separate product with the few shared vectors would read all of `vectors` again.
        rows = video.basis.flatten(0, 1)
        rows = rows if common is None else torch.cat([rows, common.basis])
        both = F.linear(rows, vectors.flatten(0, 1)).view(-1, *vectors.shape[:2])
        ours = video.basis.shape[:2].numel()
        products = both[:ours].view(*video.basis.shape[:2], *vectors.shape[:2])  # (M, K, N, T)
        shared = None if common is None else both[ours:]
        if count == 1:
            value = _weighted(products, coefficients)  # (M, N, Q)
            value = value if video.factor is None else value * video.factor
            if common is not None and shared is not None:
                value = value + (shared * self._full(common)).sum(1)
            return value.unsqueeze(2)
        theirs = None if common is None or shared is None else (shared, self._full(common))
        return _products_by_video(products, self._raw(video), video.factor, theirs)

    @override
    def dot_frames(self, vectors: Tensor) -> Tensor:
        vectors = vectors.to(self._dtype)
        video, text, shared = self.terms
        found: list[tuple[Tensor, Tensor | None]] = []
        if text is not None:
            products = text.with_frames(vectors)  # (M, F, N, L)
            if text.coefficients is not None:
                products = torch.einsum("mfnl,mlnq->mfnq", products, text.coefficients)
            found.append((products, text.factor))
        for side in (video, shared):
            if side is None:
                continue
            products = vectors @ side.basis.transpose(-1, -2)  # (M, F, K)
            if side.coefficients is None:
                found.append((products.unsqueeze(2), side.factor))
            else:
                mixed = (products @ side.coefficients.flatten(2)).unflatten(2, side.coefficients.shape[2:])
                found.append((mixed, side.factor))
        if len(found) > 1 and found[0][1] is found[1][1]:
            found[:2] = [(found[0][0] + found[1][0], found[0][1])]
        values = [value if factor is None else value * factor.unsqueeze(1) for value, factor in found]
        if self.offset is not None:
            values.append((vectors @ self.offset)[..., None, None])
        return total(values).expand(self.videos, vectors.shape[1], self.texts, self.slots)

    def _meeting(self) -> Callable[[slice, slice, Tensor], Tensor]:
        text, summed = self.terms.text, None if self._only_texts else self._summed()
        of_texts = None if text is None else self._full(text)

        def meet(videos: slice, texts: slice, vectors: Tensor) -> Tensor:
            vectors, values = vectors.to(self._dtype), []
            if summed is not None:
                products = (summed.basis[videos] @ vectors.transpose(1, 2)).unsqueeze(-1)  # (m, K, n, 1)
                values.append((products * summed.coefficients[videos, :, texts]).sum(1))
            if text is not None and of_texts is not None:
                products = text.basis[texts] @ vectors.unsqueeze(-1)  # (m, n, L, 1)
                values.append((products * of_texts[videos, :, texts].transpose(1, 2)).sum(2))
            return total(values)

        return meet

    @override
    def inner(self, other: Pairwise) -> Tensor:
        terms: list[Tensor] = []
        if not isinstance(other, PairVectors):  # from the products of its elements with the basis
            if not self._only_texts:
                summed = self._summed()
                terms.append((other.dot_frames(summed.basis) * summed.coefficients).sum(1))
            if self.terms.text is not None:
                products = other.dot(self.terms.text.basis).transpose(1, 2)
                terms.append((products * self._full(self.terms.text)).sum(1))
            return total(terms)
        mine, theirs = self._all_terms(), other._all_terms()
        for a, (first, first_kind) in enumerate(mine):
            for b, (second, second_kind) in enumerate(theirs):
                if self is other and b < a:  # counted with its mirror image
                    continue
                term = self._form(first, first_kind, other, second, second_kind)
                terms.append(2 * term if self is other and b > a else term)
        return total(terms).expand(self.videos, self.texts, max(self.slots, other.slots))

    def _form(
        self, first: BasisTerm, first_kind: str, other: PairVectors, second: BasisTerm, second_kind: str
    ) -> Tensor:
        """Return values (M, N, Q), or with axes of 1, of the bilinear form of two terms' coefficients."""
        if first_kind != "text" and (second_kind == "text" or (first.single and not second.single)):
            return other._form(second, second_kind, self, first, first_kind)
        if first_kind == "text" and first.single:
            value = self._form_of_texts(first, other, second, second_kind)
        elif first_kind == "text" or second_kind == "text":
            value = _general_form(self._raw(first), first, first_kind, other._raw(second), second, second_kind)
        else:
            gram = second.basis @ first.basis.transpose(-1, -2)  # (M, L, K), or (L, K) if both are shared
            if first.single:
                value = gram[..., None].expand(self.videos, -1, -1, -1) if gram.ndim == 3 else gram[None, ..., None]
            else:
                coefficients = self._raw(first)
                value = (gram @ coefficients.flatten(2)).unflatten(2, coefficients.shape[2:])
            value = value[:, 0] if second.single else _weighted(value, other._raw(second), fresh=True)
        for side in (first, second):
            value = value if side.factor is None else value * side.factor
        return value

    def _form_of_texts(self, first: BasisTerm, other: PairVectors, second: BasisTerm, second_kind: str) -> Tensor:
        """Return `_form` without factors, for a first side with one vector per text."""
        if second_kind == "text":
            products = (second.basis * first.basis).sum(-1)  # (N, L)
            if second.coefficients is None:
                return products.unsqueeze(0)
            return (products.T[None, :, :, None] * second.coefficients).sum(1)
        if second_kind == "shared":
            products = F.linear(second.basis, first.basis.squeeze(1))[None, ..., None]  # (1, S, N, 1)
        else:
            products = first.with_frames(second.basis)  # (M, K, N, 1)
        if second.coefficients is None:
            return products[:, 0] if second.single else products[..., 0].permute(0, 2, 1)
        return _weighted(products, second.coefficients)

    @property
    def _dtype(self) -> torch.dtype:
        return self._like.dtype

    @override
    def _stored(self) -> int:
        counts = [side.vectors.shape[:-1].numel() for side in self.terms if side is not None]
        return sum(counts) + (self.offset is not None)

    def _ones(self) -> Tensor:
        return self._like.new_ones(1, 1, 1, 1).expand(self.videos, 1, self.texts, self.slots)

    def _raw(self, side: BasisTerm) -> Tensor:
        """Return the coefficients (M, K, N, Q) of a side without its factor, with explicit identities."""
        if side.coefficients is not None:
            return side.coefficients.expand(-1, -1, -1, self.slots)
        count = side.vectors.shape[-2]
        if count == 1:
            return self._ones()
        identity = torch.eye(count, dtype=side.basis.dtype, device=side.basis.device).view(1, count, 1, count)
        return identity.expand(self.videos, -1, self.texts, -1)

    def _full(self, side: BasisTerm) -> Tensor:
        """Return the coefficients (M, K, N, Q) of a side times its factor."""
        return self._raw(side) if side.factor is None else self._raw(side) * side.factor.unsqueeze(1)

    def _with_offset(self) -> BasisTerm | None:
        """Return the shared side with the offset as one more vector with coefficient 1."""
        if self.offset is None:
            return self.terms.shared
        return _joined(self.terms.shared, BasisTerm(self._ones(), self.offset.unsqueeze(0)), self.slots)

    def _all_terms(self) -> list[tuple[BasisTerm, str]]:
        terms = zip((*self.terms[:2], self._with_offset()), ("video", "text", "shared"), strict=True)
        return [(side, kind) for side, kind in terms if side is not None]

    def _combined(self, other: PairVectors) -> PairVectors:
        slots = max(self.slots, other.slots)
        if {self.slots, other.slots} - {1, slots} or self.shape[:2] != other.shape[:2]:
            raise UserError(f"pair vectors of shapes (M, N, Q) {self.shape} and {other.shape} cannot be combined")
        pairs = zip(self.terms, other.terms, strict=True)
        terms = BasisTerms(*(self._joined_with(mine, other, theirs, slots) for mine, theirs in pairs))
        offset = other.offset
        if self.offset is not None:
            offset = self.offset if offset is None else self.offset + offset
        return PairVectors((self.videos, self.texts, slots), terms, offset)

    def _joined_with(
        self, mine: BasisTerm | None, other: PairVectors, theirs: BasisTerm | None, slots: int
    ) -> BasisTerm | None:
        if mine is None or theirs is None:
            return theirs if mine is None else mine
        alike = mine.coefficients is theirs.coefficients and mine.factor is theirs.factor
        if alike and mine.vectors.shape == theirs.vectors.shape:
            return mine.plus(theirs)
        return _joined(BasisTerm(self._full(mine), mine.basis), BasisTerm(other._full(theirs), theirs.basis), slots)


def _joined(first: BasisTerm | None, second: BasisTerm, slots: int) -> BasisTerm:
    """Return a side with the vectors of both, with coefficients for all slots."""
    if first is None:
        return second
    assert first.coefficients is not None  # callers pass explicit identities
    assert second.coefficients is not None
    coefficients = [part.expand(-1, -1, -1, slots) for part in (first.coefficients, second.coefficients)]
    return BasisTerm(torch.cat(coefficients, dim=1), torch.cat([first.basis, second.basis], dim=-2))


def _products_by_video(
    products: Tensor, coefficients: Tensor, factor: Tensor | None, shared: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return products (M, N, T, Q) of bases, summed with the coefficients of the pairs.

    On a CPU, they are computed per video, because a single product would first copy the coefficients to make the axes
    (M, N) adjacent. On other devices, this costs less than an operation per video.

    Args:
        products: Products of the basis of each video with the vectors of each text, (M, K, N, T).
        coefficients: Coefficients (M, K, N, Q).
        factor: Factor of the coefficients, (M, N, Q); None means 1.
        shared: Products (S, N, T) and coefficients (M, S, N, Q) of the vectors shared by all videos.
    """
    videos, count, texts, vectors = products.shape
    slots = coefficients.shape[-1]
    at_once = not loops_are_fast(products.device)
    if torch.is_grad_enabled() or at_once:
        full = coefficients if factor is None else coefficients * factor.unsqueeze(1)
        if shared is not None:
            products = torch.cat([products, shared[0].expand(videos, -1, -1, -1)], dim=1)
            full = torch.cat([full, shared[1]], dim=1)
        if at_once:
            return products.permute(0, 2, 3, 1) @ full.permute(0, 2, 1, 3)
        pairs = zip(products, full, strict=True)
        return torch.stack([torch.bmm(rows.permute(1, 2, 0), columns.permute(1, 0, 2)) for rows, columns in pairs])
    # Buffers are reused for every video, so that they stay in the CPU cache.
    whole = count if shared is None else count + len(shared[0])
    rows, columns = products.new_empty(whole, texts, vectors), products.new_empty(whole, texts, slots)
    result = products.new_empty(videos, texts, vectors, slots)
    if shared is not None:
        rows[count:] = shared[0]
    for j in range(videos):
        rows[:count] = products[j]
        columns[:count] = coefficients[j]
        if factor is not None:
            columns[:count] *= factor[j]
        if shared is not None:
            columns[count:] = shared[1][j]
        torch.bmm(rows.permute(1, 2, 0), columns.permute(1, 0, 2), out=result[j])
    return result


def _weighted(values: Tensor, coefficients: Tensor, fresh: bool = False) -> Tensor:
    """Return the sum (M, N, Q) over K of `values` times coefficients (M, K, N, Q); `fresh` values are overwritten."""
    whole = values.shape == torch.broadcast_shapes(values.shape, coefficients.shape)
    if fresh and whole and not torch.is_grad_enabled():
        return values.mul_(coefficients).sum(1)
    return (values * coefficients).sum(1)


def _general_form(
    a: Tensor, first: BasisTerm, first_kind: str, b: Tensor, second: BasisTerm, second_kind: str
) -> Tensor:
    """Return values (M, N, Q) of the bilinear form of coefficients `a` and `b`, at least one of them of texts."""
    axes = {"video": "mkd", "text": "nkd", "shared": "kd"}
    rows, columns = axes[first_kind], axes[second_kind].replace("k", "l")
    kept = "".join(axis for axis in "mknl" if axis in rows + columns)
    gram = torch.einsum(f"{rows},{columns}->{kept}", first.basis, second.basis)
    return (torch.einsum(f"mknq,{kept}->mlnq", a, gram) * b).sum(1)
