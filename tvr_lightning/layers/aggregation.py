"""Aggregation of a vector, or a matrix, of similarities to one (UCoFiA's ISA and Bi-ISA, as TC-MGC takes them over).

Slots come first, (S, ...), and minus infinity is a slot that is not there.
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

    def forward(self, similarities: Tensor) -> Tensor:
        """Return (...) for similarities (S, ...)."""
        scaled = self.temperature * similarities
        if bool((similarities == -torch.inf).all(0).any()):  # a softmax over nothing is no number
            scaled = torch.where((similarities == -torch.inf).all(0), 0.0, scaled)
        relevance = scaled.softmax(0)
        mixed = (self.weight.to(relevance.dtype).T @ relevance.flatten(1)).view_as(relevance)
        return weighted_sum(similarities, self.temperature * mixed)


class SoftmaxSimilarityAggregation(nn.Module):
    """Weights from one softmax, as X-CLIP has it and as TC-MGC's Table 4 does: (S, N, M) to (N, M) for instance.

    Args:
        temperature: lambda, factor inside the softmax.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, similarities: Tensor) -> Tensor:
        """Return (...) for similarities (S, ...)."""
        return weighted_sum(similarities, self.temperature * similarities)


class MeanSimilarityAggregation(nn.Module):
    """The mean over the slots that are there: (S, N, M) to (N, M) for instance."""

    def forward(self, similarities: Tensor) -> Tensor:
        """Return (...) for similarities (S, ...)."""
        return weighted_sum(similarities, torch.zeros_like(similarities))


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

    def directions(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Return word-then-frame and frame-then-word scores, each (...), for similarities (frames, words, ...)."""
        word_then_frame = self.frames_after_words(self.words(similarities.transpose(0, 1)))
        frame_then_word = self.words_after_frames(self.frames(similarities))
        return word_then_frame, frame_then_word

    def forward(self, similarities: Tensor) -> Tensor:
        """Return (...) for similarities (frames, words, ...)."""
        word_then_frame, frame_then_word = self.directions(similarities)
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


def weighted_sum(similarities: Tensor, logits: Tensor) -> Tensor:
    """Sum the slots with the weights softmax(logits); slots of minus infinity get no weight.

    Args:
        similarities: (S, ...).
        logits: (S, ...).

    Returns:
        (...): minus infinity where no slot is there at all.
    """
    absent = similarities == -torch.inf
    if not bool(absent.any()):
        return (logits.softmax(0) * similarities).sum(0)
    weights = logits.masked_fill(absent, torch.finfo(logits.dtype).min).softmax(0)
    total = (weights * similarities.masked_fill(absent, 0.0)).sum(0)
    return total.masked_fill(absent.all(0), -torch.inf)
