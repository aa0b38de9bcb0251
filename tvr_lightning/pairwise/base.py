"""Interface of pair vectors: the operations of text-conditioned vectors, independent of their form."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvr_lightning.layers.cosine import COSINE_EPS


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors (any shape) as float32, and all others unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def chained(vectors: Tensor, *layers: nn.Linear | Tensor) -> Tensor:
    """Return the result of linear layers in sequence, combined into one matrix if that is cheaper.

    Args:
        vectors: Vectors (..., D).
        layers: Layers from D to D, or matrices (D, D) like a layer's `weight`, without bias; without layers, the
            vectors are returned unchanged.

    Returns:
        Vectors (..., D).
    """
    parameters = [parameters_of(layer, vectors.dtype) for layer in layers]
    if len(parameters) > 1 and vectors.shape[:-1].numel() > vectors.shape[-1]:
        weight, bias = parameters[0]
        for second, second_bias in parameters[1:]:
            bias = second_bias if bias is None else F.linear(bias, second, second_bias)
            weight = second @ weight
        parameters = [(weight, bias)]
    for weight, bias in parameters:
        vectors = F.linear(vectors, weight, bias)
    return vectors


def parameters_like(layer: nn.Linear | nn.LayerNorm, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias (D,) of a layer in the dtype of a tensor."""
    return layer.weight.to(like.dtype), layer.bias.to(like.dtype)


def parameters_of(layer: nn.Linear | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return weight (D, D) and bias (D,) of a layer, or a matrix and no bias, in a dtype."""
    weight, bias = (layer, None) if isinstance(layer, Tensor) else (layer.weight, layer.bias)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def total(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one term; shapes are broadcast."""
    return functools.reduce(torch.add, terms)


class Pairwise(ABC):
    """One vector per video j, text i and query slot q: x[j, i, q], for all M videos and N texts.

    Slots are the query vectors of a text: one for its sentence, or one per word. Coefficients and logits have the axes
    (M, K, N, Q): the summed axis comes before the texts, so that each of its entries is one contiguous plane, which
    makes a softmax over frames several times faster than with the frames last.

    Attributes:
        videos: M.
        texts: N.
        slots: Q.
    """

    videos: int
    texts: int
    slots: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape (M, N, Q)."""
        return self.videos, self.texts, self.slots

    @classmethod
    @abstractmethod
    def from_texts(cls, vectors: Tensor, videos: int) -> Self:
        """Return x[j, i, q] = vectors[i, q] for `vectors` (N, Q, D), the same for each of `videos` videos."""

    @classmethod
    @abstractmethod
    def from_videos(cls, vectors: Tensor, texts: int) -> Self:
        """Return x[j, i, q] = vectors[j, q] for `vectors` (M, Q, D), the same for each of `texts` texts."""

    @classmethod
    @abstractmethod
    def mix(cls, weights: Tensor, basis: Tensor, side: Literal["video", "text"] = "video") -> Self:
        """Return weighted sums of video or text vectors, as in attention.

        Args:
            weights: Arbitrary weights (M, K, N, Q).
            basis: Vectors of each video (M, K, D), or of each text (N, K, D).
            side: Side that `basis` belongs to.

        Returns:
            x[j, i, q] = sum_k weights[j, k, i, q] basis[j or i, k].
        """

    @abstractmethod
    def linear(self, layer: nn.Linear | Tensor) -> Self:
        """Return the vectors after a linear layer, or after a matrix (D, D) like a layer's `weight`, without bias."""

    @abstractmethod
    def layer_norm(self, layer: nn.LayerNorm) -> Self:
        """Return the vectors after the LayerNorm `layer`, with the layer's own eps."""

    @abstractmethod
    def dropout(self, probability: float) -> Pairwise:
        """Return the vectors with elements zeroed with this probability, and the others scaled up.

        The masks of all pairs are independent. The result is dense in either form, because vectors with zeroed elements
        are not in the span of the basis.
        """

    @property
    @abstractmethod
    def vectors(self) -> Tensor:
        """Return the vectors (M, N, Q, D), which are computed if they are not in memory."""

    @abstractmethod
    def __add__(self, other: Pairwise) -> Pairwise:
        """Return the sum; a single slot of one operand is broadcast to every slot of the other."""

    @abstractmethod
    def __sub__(self, other: Pairwise) -> Pairwise:
        """Return the difference; single slots are broadcast as in a sum."""

    @abstractmethod
    def scale(self, factor: Tensor) -> Self:
        """Return every vector times its factor in `factor` (M, N, Q)."""

    @abstractmethod
    def __getitem__(self, index: tuple[slice, slice, slice]) -> Self:
        """Return the vectors of some videos, texts and slots."""

    def divided(self, start: int) -> tuple[Self, Self]:
        """Return the slots before `start` and the slots from `start` on."""
        return self[:, :, :start], self[:, :, start:]

    def joined(self) -> Self:
        """Return the same vectors in the form that is the fastest to take many parts of."""
        return self

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with T vectors of the same text: `vectors` (N, T, D) to (M, N, T, Q)."""

    def dots(self, *vectors: Tensor) -> list[Tensor]:
        """Return inner products with several sets of vectors of the same text, each as in `dot`."""
        return [self.dot(each) for each in vectors]

    @abstractmethod
    def dot_frames(self, vectors: Tensor) -> Tensor:
        """Return inner products with F vectors of the same video: `vectors` (M, F, D) to (M, F, N, Q)."""

    @abstractmethod
    def inner(self, other: Pairwise) -> Tensor:
        """Return inner products (M, N, Q) with the vectors of the same pair in `other`."""

    def materialize(self) -> Tensor:
        """Return the vectors (N, M, Q, D)."""
        return self.vectors.transpose(0, 1)

    def logits(
        self, vectors: Tensor, query: nn.Linear, key: nn.Linear, side: Literal["video", "text"] = "video"
    ) -> Tensor:
        """Return query(x[j, i, q]) . key(vectors[j or i, k]) as (M, K, N, Q), for `vectors` (M, K, D) or (N, K, D)."""
        vectors = at_least_float32(vectors)
        keys = F.linear(vectors, *parameters_like(key, vectors))
        if self._stored() < keys.shape[:2].numel():
            return self.linear(query)._along(keys, side)
        weight, bias = parameters_like(query, keys)
        biases = keys @ bias  # (M, K) or (N, K)
        biases = biases[..., None, None] if side == "video" else biases.T[None, :, :, None]
        return self._along(keys @ weight, side) + biases

    def _along(self, vectors: Tensor, side: Literal["video", "text"]) -> Tensor:
        """Return products (M, K, N, Q) with `vectors` (M, K, D) of the same video, or (N, K, D) of the same text."""
        return self.dot_frames(vectors) if side == "video" else self.dot(vectors).transpose(1, 2)

    def _stored(self) -> int:
        """Return the number of vectors that a linear layer is applied to."""
        return self.videos * self.texts * self.slots

    def norm(self) -> Tensor:
        """Return the Euclidean lengths (M, N, Q)."""
        # The square may round below zero; at zero itself the root has no gradient.
        return self.inner(self).clamp(min=COSINE_EPS**2).sqrt()

    def unit(self) -> Self:
        """Return the vectors scaled to unit length."""
        return self.scale(self.norm().reciprocal())

    def cosine(self, other: Pairwise) -> Tensor:
        """Return cosines (M, N, Q) with the vectors of the same pair in `other`."""
        return self.inner(other) / (self.norm() * other.norm())
