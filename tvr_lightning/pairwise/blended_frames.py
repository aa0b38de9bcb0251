"""Frames for attention: frames of a video, or blends that depend on the pair, such as GAID's fused frames.

A blend x[j, i, f] = v[j, f] + g[j, f, i] d[j, f] of every pair costs two vectors per frame of a video and one value
per pair and frame: a linear layer maps v and d, and a LayerNorm centers them and adds one more value per pair and
frame, because a variance is a quadratic form in g. Frames are therefore never computed per pair, unless a gate has a
value for every dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.pairwise.base import Pairwise, chained, parameters_like, total
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.tiles import loops_are_fast


class PairFrames(ABC):
    """F frames of every pair of a video j and a text i, x[j, i, f]."""

    @abstractmethod
    def layer_norm(self, layer: nn.LayerNorm) -> Self:
        """Return the frames after the LayerNorm `layer`, with the layer's own eps."""

    @abstractmethod
    def linear(self, *layers: nn.Linear) -> Self:
        """Return the frames after `layers` in sequence."""

    @abstractmethod
    def per_head(self, heads: int) -> Self:
        """Return the frames once per head, one head after another, with zeros outside the head's columns."""

    def dot(self, queries: Tensor, layer: nn.Linear | None = None) -> Tensor:
        """Return inner products (M, F, N, Q) of frames, or of `layer` of frames, with queries of the texts.

        `queries` are vectors (N, Q, D), or (M, N, Q, D) if they differ between videos.
        """
        if layer is None:
            return self._dot(queries)
        if not loops_are_fast(queries.device) or queries.shape[:-1].numel() >= self.vectors:
            return self.linear(layer)._dot(queries)
        weight, bias = parameters_like(layer, queries)
        return self._dot(queries @ weight) + (queries @ bias).unsqueeze(-3)

    @property
    @abstractmethod
    def vectors(self) -> int:
        """Return the number of vectors in memory."""

    @abstractmethod
    def _dot(self, queries: Tensor) -> Tensor:
        """Return the products with queries as in `dot`."""

    @abstractmethod
    def mix(self, weights: Tensor, form: type[Pairwise]) -> Pairwise:
        """Return sum_f weights[j, f, i, q] x[j, i, f] for `weights` (M, F, N, Q), in the given form if possible."""

    @abstractmethod
    def cosine(self, texts: Tensor) -> Tensor:
        """Return cosines (M, N, F) with the text of the same pair, for `texts` (N, D)."""


class PlainFrames(PairFrames):
    """Frames (M, F, D) of each video, the same for every text; for maps, vectors of any shape (..., F, D)."""

    def __init__(self, frames: Tensor) -> None:
        self.frames = frames

    @override
    def layer_norm(self, layer: nn.LayerNorm) -> Self:
        parameters = parameters_like(layer, self.frames)
        return type(self)(F.layer_norm(self.frames, layer.normalized_shape, *parameters, layer.eps))

    @override
    def linear(self, *layers: nn.Linear) -> Self:
        return type(self)(chained(self.frames, *layers))

    @override
    def per_head(self, heads: int) -> Self:
        return type(self)(_once_per_head(self.frames, heads))

    @property
    @override
    def vectors(self) -> int:
        return self.frames.shape[:-1].numel()

    @override
    def _dot(self, queries: Tensor) -> Tensor:
        return (self.frames @ queries.flatten(-3, -2).mT).unflatten(2, queries.shape[-3:-1])

    @override
    def mix(self, weights: Tensor, form: type[Pairwise]) -> Pairwise:
        return form.mix(weights, self.frames)

    @override
    def cosine(self, texts: Tensor) -> Tensor:
        return (unit(self.frames) @ unit(texts).T).transpose(1, 2)


class DenseFrames(PlainFrames):
    """Frames (M, N, F, D) of every pair in memory, for gates with a value per dimension and as a reference in tests."""

    @override
    def _dot(self, queries: Tensor) -> Tensor:
        return (self.frames @ queries.mT).transpose(1, 2)

    @override
    def mix(self, weights: Tensor, form: type[Pairwise]) -> Pairwise:
        return DensePairVectors(torch.einsum("mfnq,mnfd->mnqd", weights, self.frames))

    @override
    def cosine(self, texts: Tensor) -> Tensor:
        return torch.einsum("nd,mnfd->mnf", unit(texts), unit(self.frames))


class BlendedFrames(PairFrames):
    """Frames sum_k c_k[j, f, i] B_k[j, f] + offset.

    Args:
        parts: coefficients (M, F, N), or None for 1, and basis (M, F, D) of each part.
        offset: vector (H, D) added to all frames of a head.
    """

    def __init__(self, parts: list[tuple[Tensor | None, Tensor]], offset: Tensor | None = None) -> None:
        self.parts = parts
        self.offset = offset

    @override
    def layer_norm(self, layer: nn.LayerNorm) -> BlendedFrames:
        centered = [(c, basis - basis.mean(-1, keepdim=True)) for c, basis in self.parts]
        variance = _square(centered) / centered[0][1].shape[-1]
        scale = (variance + layer.eps).rsqrt()
        weight, bias = parameters_like(layer, scale)
        return BlendedFrames([(scale if c is None else scale * c, basis * weight) for c, basis in centered], bias[None])

    @override
    def linear(self, *layers: nn.Linear) -> BlendedFrames:
        if not layers:
            return self
        # The zero vector gives the contribution of the layers' biases.
        offset = self.parts[0][1].new_zeros(1, self.parts[0][1].shape[-1]) if self.offset is None else self.offset
        sizes = [basis.shape[:2].numel() for _, basis in self.parts] + [len(offset), 1]
        rows = torch.cat([*(basis.flatten(0, 1) for _, basis in self.parts), offset, torch.zeros_like(offset[:1])])
        *mapped, common, zero = chained(rows, *layers).split(sizes)
        bases = [(part - zero).view_as(basis) for part, (_, basis) in zip(mapped, self.parts, strict=True)]
        return BlendedFrames([(c, basis) for (c, _), basis in zip(self.parts, bases, strict=True)], common)

    @override
    def per_head(self, heads: int) -> BlendedFrames:
        parts = [(c if c is None else c.repeat(1, heads, 1), _once_per_head(basis, heads)) for c, basis in self.parts]
        return BlendedFrames(parts, None if self.offset is None else _once_per_head(self.offset, heads))

    @property
    @override
    def vectors(self) -> int:
        return sum(basis.shape[:-1].numel() for _, basis in self.parts)

    @override
    def _dot(self, queries: Tensor) -> Tensor:
        products = total(_times(c, PlainFrames(basis)._dot(queries)) for c, basis in self.parts)
        if self.offset is None:
            return products
        common = PlainFrames(self.offset[None])._dot(queries)  # (1 or M, H, N, Q)
        return products + common.repeat_interleave(products.shape[1] // common.shape[1], dim=1)

    @override
    def mix(self, weights: Tensor, form: type[Pairwise]) -> Pairwise:
        coefficients = torch.cat([_times(c, weights) for c, _ in self.parts], dim=1)
        mixed = form.mix(coefficients, torch.cat([basis for _, basis in self.parts], dim=1))
        if self.offset is None:
            return mixed
        common = self.offset.expand(len(weights), -1, -1)
        return mixed + form.mix(weights.unflatten(1, (len(self.offset), -1)).sum(2), common)

    @override
    def cosine(self, texts: Tensor) -> Tensor:
        products = total(_times(c, basis @ unit(texts).T) for c, basis in self.parts)
        return (products / _square(self.parts).sqrt().clamp(min=COSINE_EPS)).transpose(1, 2)


def _once_per_head(frames: Tensor, heads: int) -> Tensor:
    """Return the frames (..., F, D) once per head, (..., heads F, D), with zeros outside the head's columns."""
    if heads == 1:
        return frames
    width = frames.shape[-1] // heads
    own = torch.eye(heads, dtype=frames.dtype, device=frames.device).repeat_interleave(width, dim=1)  # (heads, D)
    return (frames.unsqueeze(-3) * own.unsqueeze(1)).flatten(-3, -2)


def _times(coefficients: Tensor | None, values: Tensor) -> Tensor:
    """Return `values` (M, F, N) or (M, F, N, Q) times coefficients (M, F, N); no coefficients mean 1."""
    if coefficients is None:
        return values
    return values * (coefficients if values.ndim == 3 else coefficients.unsqueeze(-1))


def _square(parts: list[tuple[Tensor | None, Tensor]]) -> Tensor:
    """Return the squared lengths (M, F, N) of blends without an offset, at least 0."""
    products = []
    for place, (first, basis) in enumerate(parts):
        for again, (second, other) in enumerate(parts[place:]):
            gram = (basis * other).sum(-1, keepdim=True)  # (M, F, 1)
            products.append(_times(first, _times(second, 2 * gram if again else gram)))
    return total(products).clamp(min=0)
