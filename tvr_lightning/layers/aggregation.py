"""Aggregation of a vector, or a matrix, of similarities to one (UCoFiA's ISA and Bi-ISA, as TC-MGC takes them over).

Slots come first, (S, ...), unless another axis is named, and minus infinity is a slot that is not there. Every
aggregate is a weighted sum, so that similarities may come times the temperature, which is then taken off the few sums
in place of being multiplied with all that they are of: `scaled` says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tvr_lightning.ranges import Kind, Positive


class InteractiveSimilarityAggregation(nn.Module):
    """ISA: weights from a softmax over a linear map of a softmax of the similarities (TC-MGC, Eqs. 18-19).

    Args:
        slots: S, rows and columns of the matrix (S, S), which starts as the identity.
        temperature: lambda, factor inside both softmaxes (released code: 100; the paper writes them plainly).
    """

    def __init__(self, slots: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.weight = nn.Parameter(torch.eye(slots))

    def forward(self, similarities: Tensor, dim: int = 0, whole: bool = False, scaled: bool = False) -> Tensor:
        """Return (...) for similarities (S, ...), or with the slots at `dim`; `whole` promises that all are there."""
        logits = similarities if scaled else self.temperature * similarities
        if not whole:  # a softmax over nothing is no number
            nothing = (similarities == -torch.inf).all(dim, keepdim=True)
            if torch.is_grad_enabled() or bool(nothing.any()):  # a look would make a step wait
                logits = torch.where(nothing, 0.0, logits)
        relevance = logits.softmax(dim)
        # The temperature of the second softmax stands in the matrix, which is smaller.
        matrix = self.temperature * self.weight.to(relevance.dtype).T
        total = weighted_sum(similarities, mapped_slots(matrix, relevance, dim), dim, whole)
        return total / self.temperature if scaled else total


class SoftmaxSimilarityAggregation(nn.Module):
    """Weights from one softmax, as X-CLIP has it and as TC-MGC's Table 4 does: (S, N, M) to (N, M) for instance.

    Args:
        temperature: lambda, factor inside the softmax.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, similarities: Tensor, dim: int = 0, whole: bool = False, scaled: bool = False) -> Tensor:
        """Return (...) for similarities (S, ...), or with the slots at `dim`; `whole` promises that all are there."""
        if scaled:
            return weighted_sum(similarities, similarities, dim, whole) / self.temperature
        return weighted_sum(similarities, self.temperature * similarities, dim, whole)


class MeanSimilarityAggregation(nn.Module):
    """The mean over the slots that are there: (S, N, M) to (N, M) for instance; it has no temperature to come with."""

    temperature = 1.0

    def forward(self, similarities: Tensor, dim: int = 0, whole: bool = False, scaled: bool = False) -> Tensor:
        """Return (...) for similarities (S, ...), or with the slots at `dim`; `whole` promises that all are there."""
        return similarities.mean(dim) if whole else weighted_sum(similarities, torch.zeros_like(similarities), dim)


class BidirectionalAggregation(nn.Module):
    """Bi-ISA: words then frames, frames then words, and the mean of both (TC-MGC, Eqs. 22-30).

    Args:
        kind: aggregation of each of the four steps.
        frames: rows of the matrix of similarities, such as (F, W, N, M).
        words: columns.
    """

    def __init__(self, kind: Aggregation, frames: int, words: int) -> None:
        super().__init__()
        self.words = kind.module(words)
        self.frames_after_words = kind.module(frames)
        self.frames = kind.module(frames)
        self.words_after_frames = kind.module(words)

    @property
    def temperature(self) -> float:
        """What `scaled` similarities are multiplied by."""
        temperature = self.words.temperature
        assert isinstance(temperature, int | float)  # both directions are of one kind
        return temperature

    def directions(
        self, similarities: Tensor, words: int = 1, whole: bool = False, scaled: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return word-then-frame and frame-then-word scores, each (...).

        Args:
            similarities: (frames, words, ...), or with the words at another axis.
            words: the axis of the words.
            whole: promises that all slots are there.
            scaled: whether the similarities come times `temperature`; the scores do not.
        """
        word_then_frame = self.frames_after_words(self.words(similarities, words, whole, scaled), 0, whole)
        frame_then_word = self.words_after_frames(self.frames(similarities, 0, whole, scaled), words - 1, whole)
        return word_then_frame, frame_then_word

    def forward(self, similarities: Tensor, words: int = 1, whole: bool = False, scaled: bool = False) -> Tensor:
        """Return (...) for similarities (frames, words, ...); arguments as of `directions`."""
        word_then_frame, frame_then_word = self.directions(similarities, words, whole, scaled)
        return (word_then_frame + frame_then_word) / 2


class Aggregation(Kind, ABC):
    """How the similarities of several slots become one."""

    @abstractmethod
    def module(self, slots: int) -> nn.Module:
        """Return what sums (S, ...) similarities over S `slots`."""


class ISA(Aggregation):
    """Interactive similarity aggregation: two softmaxes with a learnt matrix between them.

    Args:
        softmax_lambda: factor inside the softmaxes (TC-MGC, Table 13; both released codes: 100).
    """

    def __init__(self, softmax_lambda: Positive = 100.0) -> None:
        self.softmax_lambda = softmax_lambda

    def module(self, slots: int) -> nn.Module:
        """See `Aggregation.module`."""
        return InteractiveSimilarityAggregation(slots, self.softmax_lambda)


class SoftmaxAggregation(Aggregation):
    """One softmax, without a matrix (TC-MGC, Table 4).

    Args:
        softmax_lambda: factor inside the softmax.
    """

    def __init__(self, softmax_lambda: Positive = 100.0) -> None:
        self.softmax_lambda = softmax_lambda

    def module(self, slots: int) -> nn.Module:
        """See `Aggregation.module`."""
        return SoftmaxSimilarityAggregation(self.softmax_lambda)


class MeanAggregation(Aggregation):
    """The mean over the slots."""

    def module(self, slots: int) -> nn.Module:
        """See `Aggregation.module`."""
        return MeanSimilarityAggregation()


def weighted_sum(similarities: Tensor, logits: Tensor, dim: int = 0, whole: bool = False) -> Tensor:
    """Sum the slots with the weights softmax(logits); slots of minus infinity get no weight.

    Args:
        similarities: (S, ...), or with the slots at `dim`.
        logits: of the same shape.
        dim: the axis of the slots.
        whole: promises that all slots are there, which spares a look at all of them.

    Returns:
        (...): minus infinity where no slot is there at all.
    """
    absent = None if whole else similarities == -torch.inf
    if absent is None or not (torch.is_grad_enabled() or bool(absent.any())):  # a look would make a step wait
        return summed(logits.softmax(dim), similarities, dim)
    weights = logits.masked_fill(absent, torch.finfo(logits.dtype).min).softmax(dim)
    total = (weights * similarities.masked_fill(absent, 0.0)).sum(dim)
    return total.masked_fill(absent.all(dim), -torch.inf)


def summed(weights: Tensor, similarities: Tensor, dim: int) -> Tensor:
    """Sum similarities (S, ...) with weights of their shape, which are lost, over the slots at `dim`."""
    if torch.is_grad_enabled():
        return (weights * similarities).sum(dim)
    return weights.mul_(similarities).sum(dim)


def mapped_slots(matrix: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return sum_s matrix[r, s] values_s of the shape of `values`, for slots at `dim` and a matrix (S, S)."""
    if dim == 0:
        return (matrix @ values.flatten(1)).view_as(values)
    # As a batch, which reads the slots where they lie; `matmul` would copy all values to bring the slots to the end.
    batch = values.reshape(-1, values.shape[dim], values.shape[dim + 1 :].numel())
    return torch.bmm(matrix.expand(len(batch), -1, -1), batch).view(values.shape)
