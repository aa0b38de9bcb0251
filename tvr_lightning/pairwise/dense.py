"""Pair vectors in element form: the reference for the factorized form, and the result of dropout on it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from tvr_lightning.layers.cosine import COSINE_EPS
from tvr_lightning.pairwise.base import Pairwise, at_least_float32, parameters_like, parameters_of
from tvr_lightning.pairwise.dropout_masks import dropout_mask
from tvr_lightning.pairwise.tiles import loops_are_fast


class DensePairVectors(Pairwise):
    """Vectors of all pairs in memory, in float32 or higher precision.

    Args:
        vectors: (M, N, Q, D); axes that are expanded views are not copied until an operation needs it.
        factor: (M, N, Q) factor of the vectors, applied only by operations that need the elements; products do not.
    """

    def __init__(self, vectors: Tensor, factor: Tensor | None = None) -> None:
        self._vectors = at_least_float32(vectors)
        self._factor = factor
        self.videos, self.texts, self.slots = vectors.shape[:3]

    @property
    @override
    def vectors(self) -> Tensor:
        if self._factor is not None:
            self._vectors = self._vectors * self._factor.unsqueeze(-1)
            self._factor = None
        return self._vectors

    @classmethod
    @override
    def from_texts(cls, vectors: Tensor, videos: int) -> DensePairVectors:
        return cls(vectors.unsqueeze(0).expand(videos, -1, -1, -1))

    @classmethod
    @override
    def from_videos(cls, vectors: Tensor, texts: int) -> DensePairVectors:
        return cls(vectors.unsqueeze(1).expand(-1, texts, -1, -1))

    @classmethod
    @override
    def mix(cls, weights: Tensor, basis: Tensor, side: Literal["video", "text"] = "video") -> DensePairVectors:
        weights, basis = at_least_float32(weights), at_least_float32(basis)
        if side == "video":
            mixed = weights.flatten(2).transpose(1, 2) @ basis
            return cls(mixed.unflatten(1, weights.shape[2:]))
        return cls(torch.einsum("mknq,nkd->mnqd", weights, basis))

    @override
    def linear(self, layer: nn.Linear | Tensor) -> DensePairVectors:
        return DensePairVectors(F.linear(self.vectors, *parameters_of(layer, self.vectors.dtype)))

    @override
    def layer_norm(self, layer: nn.LayerNorm) -> DensePairVectors:
        parameters = parameters_like(layer, self.vectors)
        return DensePairVectors(F.layer_norm(self.vectors, layer.normalized_shape, *parameters, layer.eps))

    @override
    def dropout(self, probability: float) -> DensePairVectors:
        if not probability:
            return self
        mask, scale = dropout_mask(self.vectors.shape, probability, self.vectors.device)
        return DensePairVectors(self.vectors * (mask.to(self.vectors.dtype) * scale))

    @override
    def __add__(self, other: Pairwise) -> DensePairVectors:
        return DensePairVectors(self.vectors + other.vectors)

    @override
    def __sub__(self, other: Pairwise) -> DensePairVectors:
        return DensePairVectors(self.vectors - other.vectors)

    @override
    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.vectors, dim=-1).clamp(min=COSINE_EPS)

    @override
    def scale(self, factor: Tensor) -> DensePairVectors:
        return DensePairVectors(self._vectors, factor if self._factor is None else self._factor * factor)

    @override
    def __getitem__(self, index: tuple[slice, slice, slice]) -> DensePairVectors:
        return DensePairVectors(self._vectors[index], None if self._factor is None else self._factor[index])

    @override
    def dot(self, vectors: Tensor) -> Tensor:
        vectors = vectors.to(self._vectors.dtype)
        if loops_are_fast(self._vectors.device) and self.slots > 1:
            # One product per video: a single product would first copy the vectors of the pairs.
            products = torch.stack([vectors @ video.transpose(1, 2) for video in self._vectors])
        else:
            products = torch.einsum("ntd,mnqd->mntq", vectors, self._vectors)
        return products if self._factor is None else products * self._factor.unsqueeze(2)

    @override
    def dot_frames(self, vectors: Tensor) -> Tensor:
        flat = self.vectors.flatten(1, 2).transpose(1, 2)
        return (vectors.to(flat.dtype) @ flat).unflatten(2, (self.texts, self.slots))

    @override
    def inner(self, other: Pairwise) -> Tensor:
        if isinstance(other, DensePairVectors):
            return (self.vectors * other.vectors).sum(-1)
        return other.inner(self)
