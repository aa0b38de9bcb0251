"""The verbs that a method writes its text-conditioned vectors with, whichever form carries them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from tvr_lightning.layers.cosine import COSINE_EPS

P = TypeVar("P", bound="Pairwise")


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors (any shape) as float32, all others unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Pairwise(ABC):
    """One vector per video j, text i and query slot q: x[j, i, q], for all M videos and N texts.

    Slots are what a text asks with: 1 for its sentence, or one per word. Coefficients and logits have the axes
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

    @classmethod
    @abstractmethod
    def from_texts(cls: type[P], vectors: Tensor, videos: int) -> P:
        """Return x[j, i, q] = vectors[i, q] for `vectors` (N, Q, D), the same for each of `videos` videos."""

    @classmethod
    @abstractmethod
    def from_videos(cls: type[P], vectors: Tensor, texts: int) -> P:
        """Return x[j, i, q] = vectors[j, q] for `vectors` (M, Q, D), the same for each of `texts` texts."""

    @classmethod
    @abstractmethod
    def mix(cls: type[P], weights: Tensor, basis: Tensor, side: Literal["video", "text"] = "video") -> P:
        """Return weighted sums of vectors of the video, or of the text, as attention makes them.

        Args:
            weights: (M, K, N, Q), any numbers.
            basis: (M, K, D) vectors of each video, or (N, K, D) vectors of each text.
            side: whose vectors `basis` holds.

        Returns:
            x[j, i, q] = sum_k weights[j, k, i, q] basis[j or i, k].
        """

    @abstractmethod
    def linear(self: P, layer: nn.Linear) -> P:
        """Return `layer` applied to every vector."""

    @abstractmethod
    def layer_norm(self: P, layer: nn.LayerNorm) -> P:
        """Return `layer` applied to every vector, with the layer's own eps."""

    @abstractmethod
    def dropout(self: P, probability: float) -> P:
        """Return the vectors with elements set to zero at random and the others scaled up.

        Raises:
            ValueError: `probability` is above 0 in a form that never builds the elements.
        """

    @abstractmethod
    def __add__(self: P, other: P) -> P:
        """Return the sum; one of both may have a single slot, which then meets every slot of the other."""

    @abstractmethod
    def __sub__(self: P, other: P) -> P:
        """Return the difference; single slots as in a sum."""

    @abstractmethod
    def scale(self: P, factor: Tensor) -> P:
        """Return every vector times its number in `factor` (M, N, Q)."""

    @abstractmethod
    def pool(self: P, weights: Tensor) -> P:
        """Return the sum over the slots weighted by `weights` (M, N, Q), as vectors with one slot."""

    @abstractmethod
    def select(self: P, start: int, stop: int) -> P:
        """Return the slots from `start` to before `stop`."""

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with T vectors of the own text: `vectors` (N, T, D) to (M, N, T, Q)."""

    @abstractmethod
    def dot_frames(self, vectors: Tensor) -> Tensor:
        """Return inner products with F vectors of the own video: `vectors` (M, F, D) to (M, F, N, Q)."""

    @abstractmethod
    def dot_pairs(self, vectors: Tensor) -> Tensor:
        """Return inner products with a vector of the own pair: `vectors` (M, N, D) to (M, N, Q)."""

    @abstractmethod
    def inner(self: P, other: P) -> Tensor:
        """Return (M, N, Q) inner products with the vectors of the same pair in `other`."""

    @abstractmethod
    def materialize(self) -> Tensor:
        """Return the vectors themselves, (N, M, Q, D)."""

    def norm(self) -> Tensor:
        """Return the (M, N, Q) Euclidean lengths."""
        # The square may round below zero; at zero itself the root has no gradient.
        return self.inner(self).clamp(min=COSINE_EPS**2).sqrt()

    def unit(self: P) -> P:
        """Return the vectors at length 1."""
        return self.scale(self.norm().reciprocal())

    def cosine(self: P, other: P) -> Tensor:
        """Return (M, N, Q) cosines with the vectors of the same pair in `other`."""
        return self.inner(other) / (self.norm() * other.norm())
