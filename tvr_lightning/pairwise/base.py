"""The verbs that a method writes its text-conditioned vectors with, whichever form carries them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvr_lightning.layers.cosine import COSINE_EPS
from tvr_lightning.pairwise.once import name_of, once

if TYPE_CHECKING:
    from tvr_lightning.pairwise.dense import DensePairVectors

P = TypeVar("P", bound="Pairwise")
DropoutPer = Literal["pair", "video"]
"""What dropout draws anew for: every pair, or every video, whose pairs then lose the same elements."""
TEXTS_AT_A_TIME = 256
"""How many vectors of D are made at a time where each pair has its own: they stay in a processor's cache."""


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half-precision tensors (any shape) as float32, all others unchanged.

    Example:
        >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype, at_least_float32(torch.ones(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def chained(vectors: Tensor, *layers: nn.Linear) -> Tensor:
    """Return linear layers applied one after another, as one matrix where that is cheaper.

    Args:
        vectors: (..., D).
        layers: each D to D; vectors are returned as they are where there is none.

    Returns:
        (..., D).

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
    """Return weight (D, D) and bias (D,) of a layer, or of a matrix, which has none, as numbers of a type.

    Example:
        >>> parameters_of(torch.eye(1), torch.float64)
        (tensor([[1.]], dtype=torch.float64), None)
    """
    weight, bias = (layer, None) if isinstance(layer, Tensor) else (layer.weight, layer.bias)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


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
        """Return weighted sums of vectors of the video, or of the text, as attention makes them.

        Args:
            weights: (M, K, N, Q), any numbers.
            basis: (M, K, D) vectors of each video, or (N, K, D) vectors of each text.
            side: whose vectors `basis` holds.

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
        """Return a layer, or a matrix (D, D) as a layer's `weight` without bias, applied to every vector.

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
        """Return `layer` applied to every vector, with the layer's own eps.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.layer_norm(nn.LayerNorm(2)).materialize().detach().round()[0, :, 0]
            tensor([[-1.,  1.],
                    [-1.,  1.]])
        """

    @abstractmethod
    def dropout(self, probability: float, per: DropoutPer = "pair") -> Pairwise:
        """Return the vectors with elements set to zero at random and the others scaled up.

        Drawn for every pair, each element is on its own, and what comes behind is dense in either form, since no basis
        spans vectors with holes. The factorised form makes the elements from its basis, a K-th of what a linear layer
        of the dense form costs; so the draws are as many, and distributed as in the dense form. Drawn for every video,
        all its pairs and slots lose the same elements: each pair's vector is distributed as before, those of a video
        are no longer independent, and the factorised form stays factorised, since its basis loses them.

        Args:
            probability: of an element to become zero.
            per: what has draws of its own.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> [type(x.dropout(0.5, per)).__name__ for per in ("pair", "video")]
            ['DroppedPairVectors', 'PairVectors']
        """

    @abstractmethod
    def dense(self) -> DensePairVectors:
        """Return the vectors element by element, as `DensePairVectors`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> PairVectors.from_videos(torch.tensor([[[3.0, 4.0]]]), texts=2).dense().vectors.shape  # (M, N, Q, D)
            torch.Size([1, 2, 1, 2])
        """

    @abstractmethod
    def __add__(self, other: Pairwise) -> Pairwise:
        """Return the sum; one of both may have a single slot, which then meets every slot of the other.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> (x + x).norm().flatten()
            tensor([10.,  4.])
        """

    @abstractmethod
    def __sub__(self, other: Pairwise) -> Pairwise:
        """Return the difference; single slots as in a sum.

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
        """Return every vector times its number in `factor` (M, N, Q).

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
        """Return the slots before `start` and those from there on.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_texts(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), videos=1)  # M 1, N 1, Q 2, D 2
            >>> [part.norm().flatten().tolist() for part in x.divided(1)]
            [[1.0], [2.0]]
        """
        return self.select(0, start), self.select(start, self.slots)

    @abstractmethod
    def dot(self, vectors: Tensor) -> Tensor:
        """Return inner products with T vectors of the own text: `vectors` (N, T, D) to (M, N, T, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot(torch.tensor([[[1.0, 1.0]]])).flatten()
            tensor([7., 2.])
        """

    def dots(self, *vectors: Tensor) -> list[Tensor]:
        """Return inner products with several sets of vectors of the own text, as `dot` gives each.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> [products.flatten().tolist() for products in x.dots(torch.ones(1, 1, 2), torch.zeros(1, 1, 2))]
            [[7.0, 2.0], [0.0, 0.0]]
        """
        return [self.dot(each) for each in vectors]

    @abstractmethod
    def dot_frames(self, vectors: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return inner products with F vectors of the own video, or with what a matrix makes of them.

        Args:
            vectors: (M, F, D).
            weight: (D, D) matrix to apply to every vector first, which may be moved to where there are fewer.

        Returns:
            (M, F, N, Q) products x[j, i, q] . weight vectors[j, f].

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot_frames(torch.tensor([[[1.0, 1.0]], [[1.0, 1.0]]])).flatten()
            tensor([7., 2.])
        """

    @abstractmethod
    def dot_shared(self, vectors: Tensor) -> Tensor:
        """Return inner products with S vectors that all pairs have alike: `vectors` (S, D) to (M, S, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot_shared(torch.tensor([[1.0, 1.0]])).flatten()
            tensor([7., 2.])
        """

    @abstractmethod
    def dot_pairs(self, vectors: Tensor) -> Tensor:
        """Return inner products with a vector of the own pair: `vectors` (M, N, D) to (M, N, Q).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.dot_pairs(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])).flatten()
            tensor([3., 2.])
        """

    @abstractmethod
    def inner(self: P, other: P) -> Tensor:
        """Return (M, N, Q) inner products with the vectors of the same pair in `other`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.inner(x).flatten()
            tensor([25.,  4.])
        """

    @abstractmethod
    def materialize(self) -> Tensor:
        """Return the vectors themselves, (N, M, Q, D).

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.materialize().shape
            torch.Size([1, 2, 1, 2])
        """

    def logits(
        self, vectors: Tensor, query: nn.Linear, key: nn.Linear, side: Literal["video", "text"] = "video"
    ) -> Tensor:
        """Return inner products of query(x) and key(vectors), with the matrices applied where there are fewer vectors.

        Args:
            vectors: (M, K, D) of each video, or (N, K, D) of each text.
            query: D to D, of the pair vectors x.
            key: D to D, of `vectors`.
            side: whose vectors they are.

        Returns:
            (M, K, N, Q) products query(x[j, i, q]) . key(vectors[j or i, k]).

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
        """Return (M, K, N, Q) products with `vectors` (M, K, D) of the own video, or (N, K, D) of the own text."""
        return self.dot_frames(vectors) if side == "video" else self.dot(vectors).transpose(1, 2)

    def norm(self) -> Tensor:
        """Return the (M, N, Q) Euclidean lengths.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.norm().flatten()
            tensor([5., 2.])
        """
        # The square may round below zero; at zero itself the root has no gradient.
        return self.inner(self).clamp(min=COSINE_EPS**2).sqrt()

    def unit(self: P) -> P:
        """Return the vectors at length 1.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]]), texts=1)  # M 2, N 1, Q 1, D 2
            >>> x.unit().materialize()[0, :, 0]
            tensor([[0.6000, 0.8000],
                    [0.0000, 1.0000]])
        """
        return self.scale(self.norm().reciprocal())

    def cosine(self: P, other: P) -> Tensor:
        """Return (M, N, Q) cosines with the vectors of the same pair in `other`.

        Example:
            >>> from tvr_lightning.pairwise import PairVectors
            >>> x = PairVectors.from_texts(torch.tensor([[[2.0, 0.0]]]), videos=2)  # M 2, N 1, Q 1, D 2
            >>> y = PairVectors.from_videos(torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]]), texts=1)
            >>> x.cosine(y).flatten()
            tensor([0.6000, 0.0000])
        """
        return self.inner(other) / (self.norm() * other.norm())

    def cosine_each(self, made: Callable[[int, slice], Tensor]) -> Tensor:
        """Return cosines with a vector of the own pair that is made when it is needed, and lost thereafter.

        Args:
            made: (j, texts) to the vectors (n, D) of video j and the n texts of that slice.

        Returns:
            (M, N, Q).

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
        """Return what gives the products (n, Q) of video j's vectors for a slice of n texts with vectors (n, D)."""


def _of_side(values: Tensor, side: Literal["video", "text"]) -> Tensor:
    """Return (M, K, 1) numbers of videos, or (N, K, 1) of texts, so that they meet (M, K, N, Q)."""
    return values.unsqueeze(2) if side == "video" else values.transpose(0, 1).unsqueeze(0)
