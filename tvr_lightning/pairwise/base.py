"""Interface of pair vectors: the operations of text-conditioned vectors, independent of their form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvr_lightning.layers.cosine import COSINE_EPS
from tvr_lightning.pairwise.block_cache import name_of, once

if TYPE_CHECKING:
    from tvr_lightning.pairwise.dense import DensePairVectors

P = TypeVar("P", bound="Pairwise")
DropoutPer = Literal["pair", "video"]
"""Unit of independent dropout masks: every pair, or every video, whose pairs then lose the same elements."""
TEXTS_AT_A_TIME = 256
"""Number of D-dimensional vectors computed at a time if each pair has its own, so that they fit in the CPU cache."""


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors (any shape) as float32, and all others unchanged.

    Example:
        >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype, at_least_float32(torch.ones(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def chained(vectors: Tensor, *layers: nn.Linear) -> Tensor:
    """Return the result of linear layers in sequence, combined into one matrix if that is cheaper.

    Args:
        vectors: Vectors (..., D).
        layers: Layers from D to D; without layers, the vectors are returned unchanged.

    Returns:
        Vectors (..., D).

    Example:
        >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> vectors = torch.randn(5, 2)
        >>> torch.allclose(chained(vectors, first, second), second(first(vectors)), atol=1e-6)
        True
    """
    if not layers:
        return vectors
    first, *others = [_parameters(layer, vectors) for layer in layers]
    if vectors.shape[:-1].numel() <= vectors.shape[-1]:
        vectors = F.linear(vectors, *first)
        for weight, bias in others:
            vectors = F.linear(vectors, weight, bias)
        return vectors
    weight, bias = first
    for place, (second, second_bias) in enumerate(others, start=2):
        key = ("chained", *(name_of(layer) for layer in layers[:place]), vectors.dtype)
        bias = F.linear(bias, second, second_bias)
        weight = once(key, partial(torch.mm, second, weight))
    return F.linear(vectors, weight, bias)


def _parameters(layer: nn.Linear, like: Tensor) -> tuple[Tensor, Tensor]:
    return layer.weight.to(like.dtype), layer.bias.to(like.dtype)


def parameters_of(layer: nn.Linear | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return weight (D, D) and bias (D,) of a layer, or a matrix and no bias, in a dtype.

    Example:
        >>> parameters_of(torch.eye(1), torch.float64)
        (tensor([[1.]], dtype=torch.float64), None)
    """
    weight, bias = (layer, None) if isinstance(layer, Tensor) else (layer.weight, layer.bias)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


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

    @classmethod
    @abstractmethod
    def from_texts(cls: type[P], vectors: Tensor, videos: int) -> P:
        """Return x[j, i, q] = vectors[i, q] for `vectors` (N, Q, D), the same for each of `videos` videos.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> PairVectors.from_texts(torch.tensor([[[1.0, 2.0]]]), videos=2).materialize()  # (N, M, Q, D)
            tensor([[[[1., 2.]],
            <BLANKLINE>
                     [[1., 2.]]]])
        """

    @classmethod
    @abstractmethod
    def from_videos(cls: type[P], vectors: Tensor, texts: int) -> P:
        """Return x[j, i, q] = vectors[j, q] for `vectors` (M, Q, D), the same for each of `texts` texts.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.materialize()  # (N, M, Q, D)
            tensor([[[[3., 4.]],
            <BLANKLINE>
                     [[0., 2.]]]])
        """

    @classmethod
    @abstractmethod
    def mix(cls: type[P], weights: Tensor, basis: Tensor, side: Literal["video", "text"] = "video") -> P:
        """Return weighted sums of video or text vectors, as in attention.

        Args:
            weights: Arbitrary weights (M, K, N, Q).
            basis: Vectors of each video (M, K, D), or of each text (N, K, D).
            side: Side that `basis` belongs to.

        Returns:
            x[j, i, q] = sum_k weights[j, k, i, q] basis[j or i, k].

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> frames = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # (M, F, D)
            >>> weights = torch.tensor([0.25, 0.75]).view(1, 2, 1, 1)  # (M, F, N, Q)
            >>> PairVectors.mix(weights, frames).materialize()
            tensor([[[[0.2500, 0.7500]]]])
        """

    @abstractmethod
    def linear(self: P, layer: nn.Linear | Tensor) -> P:
        """Return the vectors after a linear layer, or after a matrix (D, D), used like a layer's `weight` without bias.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> double = nn.Linear(2, 2, bias=False)
            >>> _ = double.weight.data.copy_(2 * torch.eye(2))
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.linear(double).norm().flatten().detach()
            tensor([10.,  4.])
            >>> x.linear(torch.tensor([[0.0, 1.0], [1.0, 0.0]])).materialize()[0, :, 0]
            tensor([[4., 3.],
                    [2., 0.]])
        """

    @abstractmethod
    def layer_norm(self: P, layer: nn.LayerNorm) -> P:
        """Return the vectors after the LayerNorm `layer`, with the layer's own eps.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.layer_norm(nn.LayerNorm(2)).materialize().detach().round()[0, :, 0]
            tensor([[-1.,  1.],
                    [-1.,  1.]])
        """

    @abstractmethod
    def dropout(self, probability: float, per: DropoutPer = "pair") -> Pairwise:
        """Return the vectors with randomly zeroed elements, and the others scaled up.

        With a mask per pair, all elements are independent, and the result is dense in either form, because vectors
        with zeroed elements are not in the span of the basis. The factorized form computes the elements from its
        basis, with K D multiplications per vector instead of the D^2 of a linear layer; the number and distribution of
        random draws are those of the dense form. With a mask per video, all pairs and slots of a video lose the same
        elements: each pair's vector has the same distribution as before, the vectors of a video are no longer
        independent, and the factorized form stays factorized, since the mask applies to its basis.

        Args:
            probability: Probability that an element becomes zero.
            per: Unit of independent masks.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> [type(x.dropout(0.5, per)).__name__ for per in ("pair", "video")]
            ['DroppedPairVectors', 'PairVectors']
        """

    @abstractmethod
    def dense(self) -> DensePairVectors:
        """Return the vectors in element form, as `DensePairVectors`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> PairVectors.from_videos(torch.tensor([[[3.0, 4.0]]]), texts=2).dense().vectors.shape  # (M, N, Q, D)
            torch.Size([1, 2, 1, 2])
        """

    @abstractmethod
    def __add__(self, other: Pairwise) -> Pairwise:
        """Return the sum; a single slot of one operand is broadcast to every slot of the other.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> (x + x).norm().flatten()
            tensor([10.,  4.])
        """

    @abstractmethod
    def __sub__(self, other: Pairwise) -> Pairwise:
        """Return the difference; single slots are broadcast as in a sum.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> text = PairVectors.from_texts(torch.tensor([[[3.0, 0.0]]]), videos=2)
            >>> (x - text).materialize()[0, :, 0]
            tensor([[ 0.,  4.],
                    [-3.,  2.]])
        """

    @abstractmethod
    def scale(self: P, factor: Tensor) -> P:
        """Return every vector times its factor in `factor` (M, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.scale(torch.tensor([1.0, 10.0]).view(2, 1, 1)).norm().flatten()
            tensor([ 5., 20.])
        """

    @abstractmethod
    def pool(self: P, weights: Tensor) -> P:
        """Return the sum over the slots weighted by `weights` (M, N, Q), as vectors with one slot.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_texts(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), videos=1)  # M 1, N 1, Q 2, D 2
            >>> x.pool(torch.tensor([[[0.5, 0.5]]])).materialize()
            tensor([[[[0.5000, 1.0000]]]])
        """

    @abstractmethod
    def select(self: P, start: int, stop: int) -> P:
        """Return the slots from `start` to before `stop`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_texts(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), videos=1)  # M 1, N 1, Q 2, D 2
            >>> x.select(1, 2).materialize()
            tensor([[[[0., 2.]]]])
        """

    def divided(self: P, start: int) -> tuple[P, P]:
        """Return the slots before `start` and the slots from `start` on.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_texts(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), videos=1)  # M 1, N 1, Q 2, D 2
            >>> [part.norm().flatten().tolist() for part in x.divided(1)]
            [[1.0], [2.0]]
        """
        return self.select(0, start), self.select(start, self.slots)

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with T vectors of the same text: `vectors` (N, T, D) to (M, N, T, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot(torch.tensor([[[1.0, 1.0]]])).flatten()
            tensor([7., 2.])
        """

    def dots(self, *vectors: Tensor) -> list[Tensor]:
        """Return inner products with several sets of vectors of the same text, each as in `dot`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> [products.flatten().tolist() for products in x.dots(torch.ones(1, 1, 2), torch.zeros(1, 1, 2))]
            [[7.0, 2.0], [0.0, 0.0]]
        """
        return [self.dot(each) for each in vectors]

    @abstractmethod
    def dot_frames(self, vectors: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return inner products with F vectors of the same video, after an optional matrix.

        Args:
            vectors: Vectors (M, F, D).
            weight: Matrix (D, D) for these vectors, which may be applied to the other side if that has fewer vectors.

        Returns:
            Products x[j, i, q] . weight vectors[j, f], (M, F, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot_frames(torch.tensor([[[1.0, 1.0]], [[1.0, 1.0]]])).flatten()
            tensor([7., 2.])
        """

    @abstractmethod
    def dot_shared(self, vectors: Tensor) -> Tensor:
        """Return inner products with S vectors shared by all pairs: `vectors` (S, D) to (M, S, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot_shared(torch.tensor([[1.0, 1.0]])).flatten()
            tensor([7., 2.])
        """

    @abstractmethod
    def dot_pairs(self, vectors: Tensor) -> Tensor:
        """Return inner products with one vector of the same pair: `vectors` (M, N, D) to (M, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot_pairs(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])).flatten()
            tensor([3., 2.])
        """

    @abstractmethod
    def inner(self: P, other: P) -> Tensor:
        """Return inner products (M, N, Q) with the vectors of the same pair in `other`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.inner(x).flatten()
            tensor([25.,  4.])
        """

    @abstractmethod
    def materialize(self) -> Tensor:
        """Return the vectors (N, M, Q, D).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.materialize().shape
            torch.Size([1, 2, 1, 2])
        """

    def logits(
        self, vectors: Tensor, query: nn.Linear, key: nn.Linear, side: Literal["video", "text"] = "video"
    ) -> Tensor:
        """Return inner products of query(x) and key(vectors), with the matrices applied to the side with fewer vectors.

        Args:
            vectors: Vectors of each video (M, K, D), or of each text (N, K, D).
            query: Layer from D to D, for the pair vectors x.
            key: Layer from D to D, for `vectors`.
            side: Side that `vectors` belongs to.

        Returns:
            Products query(x[j, i, q]) . key(vectors[j or i, k]), (M, K, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_texts(torch.randn(1, 1, 2), videos=3)
            >>> query, key = nn.Linear(2, 2), nn.Linear(2, 2)
            >>> frames = torch.randn(3, 5, 2)
            >>> torch.allclose(x.logits(frames, query, key), x.linear(query).dot_frames(key(frames)), atol=1e-5)
            True
        """
        vectors = at_least_float32(vectors)
        keys = F.linear(vectors, *_parameters(key, vectors))
        weight, bias = _parameters(query, keys)
        return self._along(keys @ weight, side) + _of_side((keys @ bias).unsqueeze(-1), side)

    def _along(self, vectors: Tensor, side: Literal["video", "text"]) -> Tensor:
        """Return products (M, K, N, Q) with `vectors` (M, K, D) of the same video, or (N, K, D) of the same text."""
        return self.dot_frames(vectors) if side == "video" else self.dot(vectors).transpose(1, 2)

    def norm(self) -> Tensor:
        """Return the Euclidean lengths (M, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.norm().flatten()
            tensor([5., 2.])
        """
        # The square may round below zero; at zero itself the root has no gradient.
        return self.inner(self).clamp(min=COSINE_EPS**2).sqrt()

    def unit(self: P) -> P:
        """Return the vectors scaled to unit length.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.unit().materialize()[0, :, 0]
            tensor([[0.6000, 0.8000],
                    [0.0000, 1.0000]])
        """
        return self.scale(self.norm().reciprocal())

    def cosine(self: P, other: P) -> Tensor:
        """Return cosines (M, N, Q) with the vectors of the same pair in `other`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_texts(torch.tensor([[[2.0, 0.0]]]), videos=2)  # M 2, N 1, Q 1, D 2
            >>> y = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]]), texts=1)
            >>> x.cosine(y).flatten()
            tensor([0.6000, 0.0000])
        """
        return self.inner(other) / (self.norm() * other.norm())

    def cosine_each(self, made: Callable[[int, slice], Tensor]) -> Tensor:
        """Return cosines with one vector of the same pair, computed when needed and not kept.

        Args:
            made: Function from (j, texts) to the vectors (n, D) of video j and the n texts of that slice.

        Returns:
            Cosines (M, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=3)  # M 2, N 3, Q 1, D 2
            >>> x.cosine_each(lambda j, texts: torch.eye(2)[j].expand(len(range(3)[texts]), -1)).squeeze(-1)
            tensor([[0.6000, 0.6000, 0.6000],
                    [1.0000, 1.0000, 1.0000]])
        """
        meet, cosines = self._meeting(), []
        for j in range(self.videos):
            for start in range(0, self.texts, TEXTS_AT_A_TIME):
                texts = slice(start, min(start + TEXTS_AT_A_TIME, self.texts))
                vectors = at_least_float32(made(j, texts))
                cosines.append(meet(j, texts, vectors) / vectors.norm(dim=-1, keepdim=True).clamp(min=COSINE_EPS))
        return torch.cat(cosines).view(self.videos, self.texts, self.slots) / self.norm()

    @abstractmethod
    def _meeting(self) -> Callable[[int, slice, Tensor], Tensor]:
        """Return a function for the products (n, Q) of video j's vectors with vectors (n, D) of a slice of n texts."""


def _of_side(values: Tensor, side: Literal["video", "text"]) -> Tensor:
    """Return values of videos (M, K, 1), or of texts (N, K, 1), in a shape that broadcasts to (M, K, N, Q)."""
    return values.unsqueeze(2) if side == "video" else values.transpose(0, 1).unsqueeze(0)
