"""Pair vectors as coefficients over a small basis: what makes scoring all pairs cheap.

A vector that attention makes for a pair is a weighted sum of a few vectors of the video alone. A linear layer maps that
basis once per video; a LayerNorm centres it and leaves one number per pair, because a variance is a quadratic form of
the coefficients in the small Gram matrix of the basis. So no tensor with a D axis is ever made per pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvr_lightning.pairwise.base import Pairwise, at_least_float32


class Side(NamedTuple):
    """Coefficients over the vectors that one side of a pair owns.

    Attributes:
        coefficients: (M, K, N, Q); None where slot q simply is basis vector q (then K is Q, or 1 for every slot).
        basis: (M, K, D) of each video, (N, K, D) of each text, or (K, D) where all pairs share it.
    """

    coefficients: Tensor | None
    basis: Tensor


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


class PairVectors(Pairwise):
    """Vectors of all pairs, held as coefficients over vectors of the video, of the text, and of nobody.

    x[j, i, q] = sum_k c_video[j, k, i, q] B_video[j, k] + sum_l c_text[j, l, i, q] B_text[i, l]
                 + sum_s c_shared[j, s, i, q] B_shared[s] + offset

    Args:
        shape: (M, N, Q).
        sides: coefficients and bases.
        offset: (D,) what every pair has alike.

    Raises:
        ValueError: no part at all.

    Example:
        >>> frames, weights = torch.randn(2, 12, 512), torch.rand(2, 12, 1000, 1)
        >>> x = PairVectors.mix(weights, frames)  # 2 x 1000 vectors, held as 12 numbers each
        >>> x.dot(torch.randn(1000, 1, 512)).shape  # (M, N, T, Q)
        torch.Size([2, 1000, 1, 1])
    """

    def __init__(self, shape: tuple[int, int, int], sides: Sides, offset: Tensor | None = None) -> None:
        like = next((side.basis for side in sides if side is not None), offset)
        if like is None:
            raise ValueError("PairVectors need a basis of the videos, of the texts, a shared one, or an offset")
        self.videos, self.texts, self.slots = shape
        self.sides = sides
        self.offset = offset
        self._like = like

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, Q)."""
        return self.videos, self.texts, self.slots

    @classmethod
    def from_texts(cls, vectors: Tensor, videos: int) -> PairVectors:
        """See `Pairwise.from_texts`."""
        return cls((videos, len(vectors), vectors.shape[1]), Sides(text=Side(None, at_least_float32(vectors))))

    @classmethod
    def from_videos(cls, vectors: Tensor, texts: int) -> PairVectors:
        """See `Pairwise.from_videos`."""
        return cls((len(vectors), texts, vectors.shape[1]), Sides(video=Side(None, at_least_float32(vectors))))

    @classmethod
    def mix(cls, weights: Tensor, basis: Tensor, side: Literal["video", "text"] = "video") -> PairVectors:
        """See `Pairwise.mix`."""
        part = Side(at_least_float32(weights), at_least_float32(basis))
        shape = (weights.shape[0], weights.shape[2], weights.shape[3])
        return cls(shape, Sides(video=part) if side == "video" else Sides(text=part))

    def linear(self, layer: nn.Linear) -> PairVectors:
        """See `Pairwise.linear`: maps the basis, and the offset together with the layer's bias."""
        weight = layer.weight.to(self._dtype)
        sides = self.sides.map(lambda side: Side(side.coefficients, F.linear(side.basis, weight)))
        offset = None if self.offset is None else F.linear(self.offset, weight)
        if layer.bias is not None:
            bias = layer.bias.to(self._dtype)
            offset = bias if offset is None else offset + bias
        return PairVectors(self.shape, sides, offset)

    def layer_norm(self, layer: nn.LayerNorm) -> PairVectors:
        """See `Pairwise.layer_norm`: centres the basis and scales the coefficients of a pair by one number."""

        def centred(basis: Tensor) -> Tensor:
            return basis - basis.mean(-1, keepdim=True)

        sides = self.sides.map(lambda side: Side(side.coefficients, centred(side.basis)))
        offset = None if self.offset is None else centred(self.offset)
        middle = PairVectors(self.shape, sides, offset)
        variance = middle.inner(middle).clamp(min=0) / self._like.shape[-1]
        weight, bias = layer.weight.to(variance.dtype), layer.bias.to(variance.dtype)
        sides = sides.map(lambda side: Side(side.coefficients, side.basis * weight))
        scaled = PairVectors(self.shape, sides, None if offset is None else offset * weight)
        scaled = scaled.scale((variance + layer.eps).rsqrt())
        return PairVectors(self.shape, scaled.sides, bias)

    def dropout(self, probability: float) -> PairVectors:
        """See `Pairwise.dropout`; always refused, but at probability 0.

        Raises:
            ValueError: `probability` is above 0.
        """
        if probability:
            raise ValueError(
                f"the factorised form never builds the elements that dropout {probability} would zero: "
                "use DensePairVectors, or set the dropout to 0"
            )
        return self

    def __add__(self, other: PairVectors) -> PairVectors:
        """See `Pairwise.__add__`: parts that share their coefficients add their bases."""
        return self._combined(other, 1.0)

    def __sub__(self, other: PairVectors) -> PairVectors:
        """See `Pairwise.__sub__`."""
        return self._combined(other, -1.0)

    def scale(self, factor: Tensor) -> PairVectors:
        """See `Pairwise.scale`: an offset becomes a shared vector with a coefficient per pair."""
        factor = factor.to(self._dtype).unsqueeze(1)
        sides = self.sides._replace(shared=self._with_offset())
        return PairVectors(self.shape, sides.map(lambda side: Side(self._full(side) * factor, side.basis)))

    def pool(self, weights: Tensor) -> PairVectors:
        """See `Pairwise.pool`."""
        scaled = self.scale(weights)
        sides = scaled.sides.map(lambda side: Side(self._full(side).sum(-1, keepdim=True), side.basis))
        return PairVectors((self.videos, self.texts, 1), sides)

    def select(self, start: int, stop: int) -> PairVectors:
        """See `Pairwise.select`."""

        def chosen(side: Side) -> Side:
            if side.coefficients is None:
                return side if side.basis.shape[-2] == 1 else Side(None, side.basis[:, start:stop])
            return Side(self._full(side)[..., start:stop], side.basis)

        slots = len(range(*slice(start, stop).indices(self.slots)))
        return PairVectors((self.videos, self.texts, slots), self.sides.map(chosen), self.offset)

    def dot(self, vectors: Tensor) -> Tensor:
        """See `Pairwise.dot`."""
        vectors = vectors.to(self._dtype)
        result: Tensor | None = None
        if self.sides.text is not None:
            products = vectors @ self.sides.text.basis.transpose(1, 2)  # (N, T, L)
            if self.sides.text.coefficients is None:
                result = products.expand(self.videos, -1, -1, self.slots)
            else:
                result = torch.einsum("ntl,mlnq->mntq", products, self._full(self.sides.text))
        common = self._with_offset()
        shared = None if common is None else torch.einsum("sd,ntd->snt", common.basis, vectors)
        if self.sides.video is not None and self.sides.video.coefficients is None:
            products = torch.einsum("mkd,ntd->mntk", self.sides.video.basis, vectors).expand(-1, -1, -1, self.slots)
            result = products if result is None else result + products
        elif self.sides.video is not None:
            products = self._video_products(vectors, common, shared)
            return products if result is None else result + products
        if common is not None and shared is not None:
            rest = torch.einsum("snt,msnq->mntq", shared, self._full(common))
            result = rest if result is None else result + rest
        assert result is not None  # the constructor refuses vectors without any part
        return result

    def _video_products(self, vectors: Tensor, common: Side | None, shared: Tensor | None) -> Tensor:
        """Return (M, N, T, Q) products of the videos' part and the common part, video by video.

        One product over all videos would first copy the coefficients to bring the axes (M, N) side by side.
        """
        assert self.sides.video is not None
        basis, coefficients = self.sides.video.basis, self._full(self.sides.video)
        products = F.linear(basis.flatten(0, 1), vectors.flatten(0, 1))
        products = products.view(*basis.shape[:2], *vectors.shape[:2])  # (M, K, N, T)
        if common is not None and shared is not None:
            extra = self._full(common)
            rows = [torch.cat([mine, shared]) for mine in products]
            columns = [torch.cat([mine, theirs]) for mine, theirs in zip(coefficients, extra, strict=True)]
        else:
            rows, columns = list(products), list(coefficients)
        return torch.stack(
            [torch.bmm(r.permute(1, 2, 0), c.permute(1, 0, 2)) for r, c in zip(rows, columns, strict=True)]
        )

    def dot_frames(self, vectors: Tensor) -> Tensor:
        """See `Pairwise.dot_frames`."""
        vectors = vectors.to(self._dtype)
        size = (self.videos, vectors.shape[1], self.texts, self.slots)
        result: Tensor | None = None
        if self.sides.text is not None:
            products = F.linear(vectors.flatten(0, 1), self.sides.text.basis.flatten(0, 1))
            products = products.view(*vectors.shape[:2], *self.sides.text.basis.shape[:2])  # (M, F, N, L)
            if self.sides.text.coefficients is None:
                result = products.expand(size)
            else:
                result = torch.einsum("mfnl,mlnq->mfnq", products, self._full(self.sides.text))
        for side in (self.sides.video, self._with_offset()):
            if side is not None:
                products = vectors @ side.basis.transpose(-1, -2)
                part = (products @ self._full(side).flatten(2)).view(size)
                result = part if result is None else result + part
        assert result is not None  # the constructor refuses vectors without any part
        return result

    def dot_pairs(self, vectors: Tensor) -> Tensor:
        """See `Pairwise.dot_pairs`."""
        vectors = vectors.to(self._dtype)
        result: Tensor | None = None
        for side, kind in self._all_sides():
            axes = {"video": "mkd", "text": "nkd", "shared": "kd"}[kind]
            products = torch.einsum(f"mnd,{axes}->mkn", vectors, side.basis)
            part = (products.unsqueeze(-1) * self._full(side)).sum(1)
            result = part if result is None else result + part
        assert result is not None  # the constructor refuses vectors without any part
        return result

    def inner(self, other: PairVectors) -> Tensor:
        """See `Pairwise.inner`: quadratic forms in the Gram matrices of the bases."""
        mine, theirs = self._all_sides(), other._all_sides()
        result: Tensor | None = None
        for a, (first, first_kind) in enumerate(mine):
            for b, (second, second_kind) in enumerate(theirs):
                if self is other and b < a:  # counted with its mirror image
                    continue
                term = _form(self._full(first), first, first_kind, other._full(second), second, second_kind)
                term = 2 * term if self is other and b > a else term
                result = term if result is None else result + term
        assert result is not None  # the constructor refuses vectors without any part
        return result

    def materialize(self) -> Tensor:
        """See `Pairwise.materialize`."""
        result: Tensor | float = 0.0
        for side, kind in self._all_sides():
            axis = {"video": "mkd", "text": "nkd", "shared": "kd"}[kind]
            result = result + torch.einsum(f"mknq,{axis}->nmqd", self._full(side), side.basis)
        assert isinstance(result, Tensor)  # the constructor refuses vectors without any part
        return result

    @property
    def _dtype(self) -> torch.dtype:
        return self._like.dtype

    def _ones(self) -> Tensor:
        return self._like.new_ones(1, 1, 1, 1).expand(self.videos, 1, self.texts, self.slots)

    def _full(self, side: Side) -> Tensor:
        """Return the (M, K, N, Q) coefficients of a side, those of an identity and of single slots written out."""
        if side.coefficients is not None:
            return side.coefficients.expand(-1, -1, -1, self.slots)
        count = side.basis.shape[-2]
        if count == 1:
            return self._ones()
        identity = torch.eye(count, dtype=side.basis.dtype, device=side.basis.device).view(1, count, 1, count)
        return identity.expand(self.videos, -1, self.texts, -1)

    def _with_offset(self) -> Side | None:
        """Return the shared part with the offset as one more vector of coefficient 1."""
        if self.offset is None:
            return self.sides.shared
        return _joined(self.sides.shared, Side(self._ones(), self.offset.unsqueeze(0)), self.slots)

    def _all_sides(self) -> list[tuple[Side, str]]:
        sides = zip((*self.sides[:2], self._with_offset()), ("video", "text", "shared"), strict=True)
        return [(side, kind) for side, kind in sides if side is not None]

    def _combined(self, other: PairVectors, sign: float) -> PairVectors:
        slots = max(self.slots, other.slots)
        if {self.slots, other.slots} - {1, slots} or self.shape[:2] != other.shape[:2]:
            raise ValueError(f"pair vectors of shapes (M, N, Q) {self.shape} and {other.shape} do not combine")
        signed = other.sides.map(lambda side: Side(side.coefficients, sign * side.basis))
        pairs = zip(self.sides, signed, strict=True)
        sides = Sides(*(self._joined_with(mine, other, theirs, slots) for mine, theirs in pairs))
        offset = None if other.offset is None else sign * other.offset
        if self.offset is not None:
            offset = self.offset if offset is None else self.offset + offset
        return PairVectors((self.videos, self.texts, slots), sides, offset)

    def _joined_with(self, mine: Side | None, other: PairVectors, theirs: Side | None, slots: int) -> Side | None:
        if mine is None or theirs is None:
            return theirs if mine is None else mine
        if mine.coefficients is theirs.coefficients and mine.basis.shape == theirs.basis.shape:
            return Side(mine.coefficients, mine.basis + theirs.basis)
        return _joined(Side(self._full(mine), mine.basis), Side(other._full(theirs), theirs.basis), slots)


def _joined(first: Side | None, second: Side, slots: int) -> Side:
    """Return the side that has the vectors of both, with coefficients for all slots."""
    if first is None:
        return second
    assert first.coefficients is not None  # callers write identities out before
    assert second.coefficients is not None
    coefficients = [part.expand(-1, -1, -1, slots) for part in (first.coefficients, second.coefficients)]
    return Side(torch.cat(coefficients, dim=1), torch.cat([first.basis, second.basis], dim=-2))


def _form(a: Tensor, first: Side, first_kind: str, b: Tensor, second: Side, second_kind: str) -> Tensor:
    """Return (M, N, Q) values of the bilinear form of coefficients `a` and `b` in the Gram matrix of their bases."""
    if "text" not in (first_kind, second_kind):
        gram = second.basis @ first.basis.transpose(-1, -2)  # (M, L, K), or (L, K) where both are shared
        return ((gram @ a.flatten(2)).unflatten(2, a.shape[2:]) * b).sum(1)
    axes = {"video": "mkd", "text": "nkd", "shared": "kd"}
    rows, columns = axes[first_kind], axes[second_kind].replace("k", "l")
    kept = "".join(axis for axis in "mknl" if axis in rows + columns)
    gram = torch.einsum(f"{rows},{columns}->{kept}", first.basis, second.basis)
    return (torch.einsum(f"mknq,{kept}->mlnq", a, gram) * b).sum(1)
