"""Aggregation of a vector, or a matrix, of similarities to one (UCoFiA's ISA and Bi-ISA, as TC-MGC takes them over).

Slots come first, (S, ...), and minus infinity is a slot that is not there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

SimilarityAggregation = Literal["isa", "softmax", "mean"]


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
        temperature: lambda.
    """

    def __init__(self, kind: SimilarityAggregation, frames: int, words: int, temperature: float) -> None:
        super().__init__()
        self.words = aggregation(kind, words, temperature)
        self.frames_after_words = aggregation(kind, frames, temperature)
        self.frames = aggregation(kind, frames, temperature)
        self.words_after_frames = aggregation(kind, words, temperature)

    def directions(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Return word-then-frame and frame-then-word scores, each (...), for similarities (frames, words, ...)."""
        word_then_frame = self.frames_after_words(self.words(similarities.transpose(0, 1)))
        frame_then_word = self.words_after_frames(self.frames(similarities))
        return word_then_frame, frame_then_word

    def forward(self, similarities: Tensor) -> Tensor:
        """Return (...) for similarities (frames, words, ...)."""
        word_then_frame, frame_then_word = self.directions(similarities)
        return (word_then_frame + frame_then_word) / 2


def aggregation(kind: SimilarityAggregation, slots: int, temperature: float) -> nn.Module:
    """Return the module that sums (S, ...) similarities over S `slots` in the way `kind` says."""
    if kind == "isa":
        return InteractiveSimilarityAggregation(slots, temperature)
    return SoftmaxSimilarityAggregation(temperature) if kind == "softmax" else MeanSimilarityAggregation()


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
