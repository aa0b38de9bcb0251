"""Vectors of all pairs after dropout, computed in cache-sized tiles and not kept.

Vectors with zeroed elements are not in the span of a basis, so each of them has to be computed, normalized and
multiplied by the text's vectors. Operator by operator, each step would read and write all elements of all pairs. Here a
tile of some texts and videos goes through all steps, and the backward pass recomputes it. Only the products and one
byte per element for the dropout mask are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from tvr_lightning.layers.cosine import COSINE_EPS, unit
from tvr_lightning.pairwise.base import parameters_of
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.tiles import LARGE_TILE, TILE, loops_are_fast

VIDEOS_AT_A_TIME = 16
"""Number of videos in a tile if a pair has a single vector; each text is then multiplied by several videos at once."""


class Summed(NamedTuple):
    """Vectors as sums over the basis of their video.

    Attributes:
        coefficients: (M, K, N, Q).
        basis: (M, K, D).
        of: tensors that the coefficients were computed from.
    """

    coefficients: Tensor
    basis: Tensor
    of: Sequence[Tensor | None] = ()

    def rows(self, videos: slice, texts: slice) -> Tensor:
        """Return the coefficients (v, K, n Q) of a tile."""
        return self.coefficients[videos, :, texts].flatten(2)

    def mixed(self, videos: slice = slice(None), texts: slice = slice(None)) -> Tensor:
        """Return the vectors (v, n Q, D) of a tile, or of all pairs."""
        return torch.bmm(self.rows(videos, texts).transpose(1, 2), self.basis[videos])

    def add_gradients(self, sums: Summed, videos: slice, texts: slice, gradient: Tensor) -> None:
        """Add the contribution of the gradient (v, n, Q, D) of a tile to the sums."""
        rows = gradient.flatten(1, 2)
        slots = self.coefficients.shape[-1]
        sums.coefficients[videos, :, texts] = (self.basis[videos] @ rows.transpose(1, 2)).unflatten(2, (-1, slots))
        sums.basis[videos].baddbmm_(self.rows(videos, texts), rows)

    def zeros(self) -> Summed:
        """Return zero-initialized sums for gradients."""
        return Summed(torch.zeros_like(self.coefficients), torch.zeros_like(self.basis))

    def part(self, videos: slice, texts: slice, slots: slice) -> Summed:
        """Return the sums of some videos, texts and slots."""
        return Summed(self.coefficients[videos, :, texts, slots].contiguous(), self.basis[videos])


class DroppedPairVectors(DensePairVectors):
    """Dense vectors x = staying * dropped + whole, or their LayerNorm, computed when an operation needs them.

    Args:
        dropped: input of dropout, already scaled up.
        staying: (M, N, Q, D) uint8 dropout mask, 1 for elements that are kept.
        whole: vectors that are added without dropout.
        layer: LayerNorm after the sum; products with vectors of texts then need no vectors in memory.
        to_unit: scaling to unit length after the LayerNorm.
    """

    def __init__(
        self,
        dropped: Summed,
        staying: Tensor,
        whole: Summed | None = None,
        layer: nn.LayerNorm | None = None,
        to_unit: bool = False,
    ) -> None:
        self.dropped = dropped
        self.staying = staying
        self.whole = whole
        self.layer = layer
        self.to_unit = to_unit
        self.videos, self.texts, self.slots = staying.shape[:3]
        self._factor: Tensor | None = None

    @property
    def open(self) -> bool:
        """Return True if vectors can still be added: there is no LayerNorm yet."""
        return self.layer is None and self.whole is None

    @override
    def layer_norm(self, layer: nn.LayerNorm) -> DensePairVectors:  # type: ignore[override]
        if self.layer is not None:
            return super().layer_norm(layer)
        return DroppedPairVectors(self.dropped, self.staying, self.whole, layer)

    @override
    def linear(self, layer: nn.Linear | Tensor) -> DensePairVectors:  # type: ignore[override]
        if self.layer is None or self.to_unit:
            return super().linear(layer)
        return DensePairVectors(self._behind(self.layer, *parameters_of(layer, self.dropped.basis.dtype)))

    @override
    def unit(self) -> DensePairVectors:  # type: ignore[override]
        if self.layer is None or self.to_unit:
            return super().unit()
        return DroppedPairVectors(self.dropped, self.staying, self.whole, self.layer, to_unit=True)

    @override
    def __getitem__(self, index: tuple[slice, slice, slice]) -> DensePairVectors:  # type: ignore[override]
        dropped = self.dropped.part(*index)
        whole = self.whole
        if whole is not None:
            alike = whole.coefficients is self.dropped.coefficients
            whole = Summed(dropped.coefficients, whole.basis[index[0]]) if alike else whole.part(*index)
        return DroppedPairVectors(dropped, self.staying[index], whole, self.layer, self.to_unit)

    @override
    def dot(self, vectors: Tensor) -> Tensor:
        if self.layer is None:
            return super().dot(vectors)
        eps, *tensors = self._arguments(self.layer)
        products: Tensor = _Products.apply(eps, self.to_unit, vectors.to(self.dropped.basis.dtype), *tensors)
        return products

    @override
    def dots(self, *vectors: Tensor) -> list[Tensor]:
        return list(self.dot(torch.cat(vectors, dim=1)).split([each.shape[1] for each in vectors], dim=2))

    def _arguments(self, layer: nn.LayerNorm) -> tuple[Any, ...]:
        """Return the arguments of a `_Recipe` in its order."""
        dtype = self.dropped.basis.dtype
        whole = () if self.whole is None else self.whole[:2]
        return layer.eps, self.staying, layer.weight.to(dtype), layer.bias.to(dtype), *self.dropped[:2], *whole

    @functools.cached_property
    def _vectors(self) -> Tensor:  # type: ignore[override]
        if self.layer is None:
            vectors = self.dropped.mixed().view(self.staying.shape) * self.staying
            return vectors if self.whole is None else vectors + self.whole.mixed().view(self.staying.shape)
        made = self._behind(self.layer)
        return unit(made) if self.to_unit else made

    def _behind(self, layer: nn.LayerNorm, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the vectors (M, N, Q, E) after a LayerNorm and, if its weight (E, D) is given, a linear layer."""
        eps, *tensors = self._arguments(layer)
        made: Tensor = _Normalized.apply(eps, weight, bias, *tensors)
        return made


class _Recipe:
    """Inputs for computing the vectors of a tile, and for their gradients."""

    def __init__(self, eps: float, staying: Tensor, weight: Tensor, bias: Tensor, *sums: Tensor) -> None:
        self.eps = eps
        self.staying = staying
        self.weight = weight
        self.bias = bias
        self.dropped, *self.whole = (Summed(*pair) for pair in zip(sums[::2], sums[1::2], strict=True))

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Yield the videos and the texts of every tile."""
        videos, texts, slots, size = self.staying.shape
        if loops_are_fast(self.staying.device):
            pairs = max(TILE // (slots * size), 1)
            few = min(videos, VIDEOS_AT_A_TIME if slots == 1 else 1, pairs)
        else:
            pairs = max(LARGE_TILE // (slots * size), 1)
            few = min(videos, pairs)
        many = max(pairs // few, 1)
        for text in range(0, texts, many):
            for video in range(0, videos, few):
                yield slice(video, min(video + few, videos)), slice(text, min(text + many, texts))

    def made(self, videos: slice, texts: slice) -> tuple[Tensor, ...]:
        """Return the dropout mask, the vectors before and after the LayerNorm, (v, n, Q, D), and its mean and scale."""
        staying = self.staying[videos, texts].to(self.dropped.basis.dtype)
        before = self.dropped.mixed(videos, texts).view(staying.shape).mul_(staying)
        rows = before.view(len(before), -1, before.shape[-1])
        for whole in self.whole:
            rows.baddbmm_(whole.rows(videos, texts).transpose(1, 2), whole.basis[videos])
        return staying, before, *torch.native_layer_norm(before, [before.shape[-1]], self.weight, self.bias, self.eps)


class _Gradients:
    """Gradients of the inputs of a recipe, summed over tiles."""

    def __init__(self, recipe: _Recipe) -> None:
        self.recipe = recipe
        self.weight = torch.zeros_like(recipe.weight)
        self.bias = torch.zeros_like(recipe.bias)
        self.sums = [part.zeros() for part in (recipe.dropped, *recipe.whole)]

    def add(self, videos: slice, texts: slice, gradient: Tensor, made: tuple[Tensor, ...]) -> None:
        """Add the contribution of the gradient (v, n, Q, D) of a tile after its LayerNorm, given what was `made`."""
        staying, before, _, mean, scale = made
        recipe = self.recipe
        size = [gradient.shape[-1]]
        gradient, weight, bias = torch.ops.aten.native_layer_norm_backward(
            gradient, before, size, mean, scale, recipe.weight, recipe.bias, [True, True, True]
        )
        self.weight += weight
        self.bias += bias
        for whole, sums in zip(recipe.whole, self.sums[1:], strict=True):
            whole.add_gradients(sums, videos, texts, gradient)
        recipe.dropped.add_gradients(self.sums[0], videos, texts, gradient.mul_(staying))

    def all(self) -> tuple[Tensor, ...]:
        """Return the gradients in the order of a recipe, without eps and the dropout mask."""
        return self.weight, self.bias, *(tensor for sums in self.sums for tensor in sums[:2])


class _Normalized(torch.autograd.Function):
    """Vectors (M, N, Q, E) after the LayerNorm and a linear layer (E, D), or (M, N, Q, D) without one."""

    @staticmethod
    def forward(ctx: Any, eps: float, weight: Tensor | None, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        recipe = _Recipe(eps, *tensors)
        *pairs, size = recipe.staying.shape
        result = recipe.weight.new_empty(*pairs, size if weight is None else len(weight))
        for videos, texts in recipe.pieces():
            normalized = recipe.made(videos, texts)[2]
            result[videos, texts] = normalized if weight is None else F.linear(normalized, weight, bias)
        ctx.save_for_backward(weight, bias, *tensors)
        ctx.eps = eps
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, *tensors = ctx.saved_tensors
        recipe = _Recipe(ctx.eps, *tensors)
        gradients = _Gradients(recipe)
        of_weight = None if weight is None else torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        for videos, texts in recipe.pieces():
            made = recipe.made(videos, texts)
            behind = gradient[videos, texts].contiguous()
            if of_weight is not None:
                rows = behind.flatten(0, 2)
                of_weight.addmm_(rows.T, made[2].flatten(0, 2))
                if of_bias is not None:
                    of_bias += rows.sum(0)
                behind = behind @ weight
            gradients.add(videos, texts, behind, made)
        return (None, of_weight, of_bias, None, *gradients.all())


class _Products(torch.autograd.Function):
    """Products (M, N, T, Q) of vectors after the LayerNorm, optionally at unit length, with text vectors (N, T, D)."""

    @staticmethod
    def forward(ctx: Any, eps: float, to_unit: bool, vectors: Tensor, *tensors: Tensor) -> Tensor:
        recipe = _Recipe(eps, *tensors)
        videos, texts, slots, _ = recipe.staying.shape
        products = vectors.new_empty(videos, texts, vectors.shape[1], slots)
        lengths = vectors.new_empty(videos, texts, 1, slots) if to_unit else None
        for few, some in recipe.pieces():
            normalized = recipe.made(few, some)[2]
            met = torch.bmm(vectors[some], _by_text(normalized).transpose(1, 2))  # (n, T, v Q)
            products[few, some] = met.unflatten(2, (-1, slots)).permute(2, 0, 1, 3)
            if lengths is not None:
                lengths[few, some, 0] = torch.linalg.vector_norm(normalized, dim=-1)
        if lengths is not None:
            products /= lengths.clamp_(min=COSINE_EPS)
        ctx.save_for_backward(vectors, products, lengths, *tensors)
        ctx.eps = eps
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        vectors, products, lengths, *tensors = ctx.saved_tensors
        recipe = _Recipe(ctx.eps, *tensors)
        gradients = _Gradients(recipe)
        of_vectors = torch.zeros_like(vectors)
        shrinking = None
        if lengths is not None:  # a longer vector has smaller products
            gradient = gradient / lengths
            shrinking = (gradient * products).sum(2) / lengths[:, :, 0]
            shrinking = (shrinking * (lengths[:, :, 0] > COSINE_EPS)).unsqueeze(-1)
        for few, some in recipe.pieces():
            made = recipe.made(few, some)
            normalized = made[2]
            met = gradient[few, some].permute(1, 2, 0, 3).flatten(2)  # (n, T, v Q)
            of_vectors[some].baddbmm_(met, _by_text(normalized))
            behind = torch.bmm(met.transpose(1, 2), vectors[some])
            behind = behind.unflatten(1, (-1, normalized.shape[2])).transpose(0, 1).contiguous()
            if shrinking is not None:
                behind.addcmul_(normalized, shrinking[few, some], value=-1)
            gradients.add(few, some, behind, made)
        return (None, None, of_vectors, None, *gradients.all())


def _by_text(vectors: Tensor) -> Tensor:
    """Return (v, n, Q, D) as (n, v Q, D), without a copy if v or Q is 1."""
    return vectors.transpose(0, 1).flatten(1, 2)
