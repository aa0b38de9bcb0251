"""Ranks of queries as counts of gallery items that score higher than the match and that score the same.

Counts add up over blocks and processes. With ties the rank is random, and its expectation and the probability of being
among the first K follow from both counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, first_of_each


@dataclass
class Ranks(FeatureBatch):
    """Ranks of the matches of Q queries.

    Attributes:
        better: (Q,) int64, number of gallery items that score strictly higher than the match.
        tied: (Q,) int64, number of gallery items that score the same as the match, including the match (at least 1).
        index: (Q,) int64, identity of each query: the index of the text or video in its split.
    """

    better: Tensor
    tied: Tensor
    index: Tensor

    def expected(self) -> Tensor:
        """Return the ranks (Q,) float64, from 1, in expectation over random tie-breaking."""
        return 1.0 + self.better.double() + (self.tied.double() - 1.0) / 2.0

    def found_within(self, k: int) -> Tensor:
        """Return the probabilities (Q,) float64 that the match is among the first `k`, with ties broken at random."""
        return ((k - self.better).double() / self.tied.double()).clamp(0.0, 1.0)

    def reciprocal(self) -> Tensor:
        """Return the expectations (Q,) float64 of 1 / rank, with ties broken at random."""
        first, last = self.better.double(), (self.better + self.tied).double()
        return (torch.digamma(last + 1.0) - torch.digamma(first + 1.0)) / self.tied.double()

    def discounted_within(self, k: int) -> Tensor:
        """Return the expectations (Q,) float64 of 1 / log2(1 + rank), 0 after rank `k`, with ties broken at random."""
        gains = 1.0 / torch.arange(1, k + 1, dtype=torch.float64, device=self.better.device).add(1.0).log2()
        total = torch.cat([gains.new_zeros(1), gains.cumsum(0)])  # of the first 0 to k ranks
        last = (self.better + self.tied).clamp(max=k)
        return (total[last] - total[self.better.clamp(max=k)]) / self.tied.double()

    def deduplicated(self) -> Ranks:
        """Return every query once, sorted by `index`. Padded samplers and gathering over processes repeat some."""
        return self[first_of_each(self.index)]


def count_ranks(scores: Tensor, match: Tensor, index: Tensor | None = None) -> Ranks:
    """Rank each query's match (Q,) in scores (Q, G). Raise UserError if a score is NaN."""
    raise_on_nan(scores, "query", "gallery item")
    own = scores.gather(1, match[:, None])
    index = torch.arange(len(scores), device=scores.device) if index is None else index
    return Ranks(better=(scores > own).sum(dim=1), tied=(scores == own).sum(dim=1), index=index)


def text_to_video_ranks(similarity: Tensor, video_of_text: Tensor) -> Ranks:
    """Rank each text's video (N,) in scores (N, M); each caption is a separate query."""
    return count_ranks(similarity, video_of_text)


def video_to_text_ranks(similarity: Tensor, video_of_text: Tensor) -> Ranks:
    """Rank each video's captions in scores (N, M), with a video represented by its best caption.

    The multi-caption protocol of CLIP4Clip (`tensor_video_to_text_sim` in its metrics.py): ranks count videos, not
    captions. Videos without a caption are neither queries nor competitors.
    """
    raise_on_nan(similarity, "text", "video")
    videos, group = torch.unique(video_of_text, return_inverse=True)
    best = similarity.new_full((len(videos), len(videos)), float("-inf"))
    best.scatter_reduce_(0, group[:, None].expand(-1, len(videos)), similarity[:, videos], reduce="amax")
    return count_ranks(best.T, torch.arange(len(videos), device=similarity.device), videos)


def raise_on_nan(scores: Tensor, row: str, column: str) -> None:
    """Raise UserError if scores (Q, G) are NaN, which would rank best, since comparisons with NaN are false."""
    nan = torch.isnan(scores)
    if nan.any():
        first = nan.nonzero()[0].tolist()
        raise UserError(
            f"{int(nan.sum())} of {nan.numel()} scores are NaN, in {int(nan.any(dim=1).sum())} rows and "
            f"{int(nan.any(dim=0).sum())} columns; the first is {row} {first[0]} against {column} {first[1]}. "
            "Look for an overflow or an empty mask in the method's score"
        )
