"""Aggregation of a vector or a matrix of similarities to one score (UCoFiA's ISA and Bi-ISA, also used by TC-MGC).

Slots are the first dimension, (S, ...), unless another axis is given, and minus infinity marks an absent slot. Every
aggregate is a weighted sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.option_types import ConfigVariant, Positive


class Aggregation(ConfigVariant, ABC):
    """Aggregation of the similarities of several slots to one."""

    learned = False
    """Whether it has a matrix (S, S), which is initialized as the identity."""
    softmax_lambda = 1.0

    def module(self, slots: int) -> SlotAggregation:
        """Return the module that aggregates similarities (S, ...) over S `slots`."""
        return SlotAggregation(self, slots)

    @abstractmethod
    def total(self, similarities: Tensor, logits: Tensor, matrix: Tensor | None, dim: int, whole: bool) -> Tensor:
        """Return the sum over the slots at `dim`, with weights from `logits`, the similarities times softmax_lambda."""


class SoftmaxAggregation(Aggregation):
    """Softmax aggregation without a matrix (TC-MGC, Table 4).

    Attributes:
        softmax_lambda: factor inside the softmax.
    """

    softmax_lambda: Positive = 100.0

    @override
    def total(self, similarities: Tensor, logits: Tensor, matrix: Tensor | None, dim: int, whole: bool) -> Tensor:
        return weighted_sum(similarities, logits, dim, whole, matrix)


class ISA(SoftmaxAggregation):
    """Interactive similarity aggregation: two softmaxes with a learned matrix between them (TC-MGC, Eqs. 18-19).

    Args:
        softmax_lambda: factor inside the softmaxes (TC-MGC, Table 13; both released codes: 100).
    """

    learned = True

    @override
    def total(self, similarities: Tensor, logits: Tensor, matrix: Tensor | None, dim: int, whole: bool) -> Tensor:
        if not whole:  # the softmax of an empty set is NaN
            nothing = (similarities == -torch.inf).all(dim, keepdim=True)
            if torch.is_grad_enabled() or bool(nothing.any()):  # training avoids the device synchronization
                logits = torch.where(nothing, 0.0, logits)
        assert matrix is not None
        # The second factor is applied to the matrix, which is smaller.
        relevance = mapped_slots(self.softmax_lambda * matrix, logits.softmax(dim), dim)
        return weighted_sum(similarities, relevance, dim, whole)


class MeanAggregation(Aggregation):
    """Mean over the slots that are present."""

    @override
    def total(self, similarities: Tensor, logits: Tensor, matrix: Tensor | None, dim: int, whole: bool) -> Tensor:
        return similarities.mean(dim) if whole else weighted_sum(similarities, torch.zeros_like(similarities), dim)


class SlotAggregation(nn.Module):
    """Sum of similarities over their S slots, weighted as `kind` defines."""

    def __init__(self, kind: Aggregation, slots: int) -> None:
        super().__init__()
        self.kind = kind
        self.temperature = kind.softmax_lambda
        self.weight = nn.Parameter(torch.eye(slots)) if kind.learned else None

    def forward(self, similarities: Tensor, dim: int = 0, whole: bool = False, scaled: bool = False) -> Tensor:
        """Return sums (...) of similarities (S, ...), or with the slots at `dim`. `whole`: no slot is absent."""
        matrix = None if self.weight is None else self.weight.to(similarities.dtype).T
        if not scaled:
            return self.kind.total(similarities, self.temperature * similarities, matrix, dim, whole)
        # Multiplied by the temperature already. Dividing the few sums is cheaper than multiplying all similarities.
        return self.kind.total(similarities, similarities, matrix, dim, whole) / self.temperature


class BidirectionalAggregation(nn.Module):
    """Bi-ISA: words then frames, frames then words, and the mean of both (TC-MGC, Eqs. 22-30).

    Args:
        kind: Aggregation of each of the four steps.
        frames: Number of rows of the similarity matrix, such as (F, W, N, M).
        words: Number of columns.
    """

    def __init__(self, kind: Aggregation, frames: int, words: int) -> None:
        super().__init__()
        self.words = kind.module(words)
        self.frames_after_words = kind.module(frames)
        self.frames = kind.module(frames)
        self.words_after_frames = kind.module(words)
        self.temperature = self.words.temperature

    def directions(
        self, similarities: Tensor, words: int = 1, whole: bool = False, scaled: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return word-then-frame and frame-then-word scores (...) of similarities (frames, words, ...)."""
        word_then_frame = self.frames_after_words(self.words(similarities, words, whole, scaled), 0, whole)
        frame_then_word = self.words_after_frames(self.frames(similarities, 0, whole, scaled), words - 1, whole)
        return word_then_frame, frame_then_word

    def forward(self, similarities: Tensor, words: int = 1, whole: bool = False, scaled: bool = False) -> Tensor:
        """Return the mean (...) of both `directions`, with the same arguments."""
        word_then_frame, frame_then_word = self.directions(similarities, words, whole, scaled)
        return (word_then_frame + frame_then_word) / 2


def without(absent: Tensor | None, similarity: Tensor) -> Tensor:
    """Set similarities (S, ...) of `absent` slots (broadcast) to minus infinity. None means no slot."""
    return similarity if absent is None else similarity.masked_fill(absent, -torch.inf)


def weighted_sum(
    similarities: Tensor, logits: Tensor, dim: int = 0, whole: bool = False, matrix: Tensor | None = None
) -> Tensor:
    """Return the sum over the slots at `dim`, weighted by softmax(logits); minus infinity if all slots are absent.

    A `matrix` (S, S) is applied to the weights. Slots of minus infinity get no weight; `whole` skips their check.
    """
    absent = None if whole else similarities == -torch.inf
    if absent is not None and (torch.is_grad_enabled() or bool(absent.any())):  # training avoids the device sync
        logits = logits.masked_fill(absent, torch.finfo(logits.dtype).min)
        similarities = similarities.masked_fill(absent, 0.0)
    else:
        absent = None
    weights = logits.softmax(dim)
    if matrix is not None:
        weights = mapped_slots(matrix, weights, dim)
    products = weights * similarities if torch.is_grad_enabled() else weights.mul_(similarities)
    total = products.sum(dim)
    return total if absent is None else total.masked_fill(absent.all(dim), -torch.inf)


def mapped_slots(matrix: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return sum_s matrix[r, s] values_s of the shape of `values`, for slots at `dim` and a matrix (S, S)."""
    if dim == 0:
        return (matrix @ values.flatten(1)).view_as(values)
    # As a batch, which reads the slots in place; `matmul` would copy all values to move the slots to the end.
    batch = values.reshape(-1, values.shape[dim], values.shape[dim + 1 :].numel())
    return torch.bmm(matrix.expand(len(batch), -1, -1), batch).view(values.shape)
