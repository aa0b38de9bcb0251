"""Ranks of queries as counts: how many gallery items score higher than the match, and how many score the same.

Counts are sums over the gallery, so they add up over blocks and over processes, and they keep what a single rank loses:
with ties the rank is random, and its expectation and the chance to be among the first K follow from both counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.features import Record


@dataclass
class Ranks(Record):
    """Ranks of the matches of Q queries.

    Attributes:
        better: (Q,) int64, number of gallery items that score strictly higher than the match.
        tied: (Q,) int64, number of gallery items that score the same as the match, the match included (so at least 1).
        index: (Q,) int64, identity of each query: the place of the text or of the video in its split.
    """

    better: Tensor
    tied: Tensor
    index: Tensor

    def expected(self) -> Tensor:
        """Return the (Q,) float64 ranks, from 1, expected when ties are broken at random."""
        return 1.0 + self.better.double() + (self.tied.double() - 1.0) / 2.0

    def found_within(self, k: int) -> Tensor:
        """Return the (Q,) float64 probabilities that the match is among the first `k` when ties are broken at random.

        Raises:
            ValueError: `k` is below 1.
        """
        if k < 1:
            raise ValueError(f"recall at K needs K >= 1, got {k}")
        return ((k - self.better).double() / self.tied.double()).clamp(0.0, 1.0)

    def deduplicated(self) -> Ranks:
        """Return every query once, in the order of `index`: padded samplers and gathered processes repeat some.

        Raises:
            ValueError: two entries of one query disagree, so that they cannot be repetitions.
        """
        order = torch.argsort(self.index, stable=True)
        repeated = torch.zeros_like(order, dtype=torch.bool)
        sorted_ranks = self[order]
        repeated[1:] = sorted_ranks.index[1:] == sorted_ranks.index[:-1]
        differs = torch.zeros_like(repeated)
        for counts in (sorted_ranks.better, sorted_ranks.tied):
            differs[1:] |= counts[1:] != counts[:-1]
        conflict = repeated & differs
        if conflict.any():
            raise ValueError(
                f"query {int(sorted_ranks.index[conflict][0])} has two different ranks; "
                f"{int(conflict.sum())} queries do. Ranks of one query must come from one gallery"
            )
        return sorted_ranks[~repeated]


def count_ranks(scores: Tensor, match: Tensor, index: Tensor | None = None) -> Ranks:
    """Rank the match of every query by counting.

    Args:
        scores: (Q, G) scores of Q queries against G gallery items; larger is better.
        match: (Q,) int64, column of each query's match.
        index: (Q,) int64 identities of the queries; their row numbers where it is not given.

    Returns:
        Ranks of the Q queries.

    Raises:
        ValueError: a score is NaN.
    """
    raise_on_nan(scores, "query", "gallery item")
    own = scores.gather(1, match[:, None])
    better = (scores > own).sum(dim=1)
    tied = (scores == own).sum(dim=1)
    if index is None:
        index = torch.arange(len(scores), device=scores.device)
    return Ranks(better=better, tied=tied, index=index)


def text_to_video_ranks(similarity: Tensor, video_of_text: Tensor) -> Ranks:
    """Rank each text's own video among all videos; each caption is a query of its own.

    Args:
        similarity: (N, M) scores of N texts against M videos.
        video_of_text: (N,) int64, column of the video that each text describes.

    Returns:
        Ranks of the N texts, identified by their rows.

    Raises:
        ValueError: a score is NaN.
    """
    return count_ranks(similarity, video_of_text)


def video_to_text_ranks(similarity: Tensor, video_of_text: Tensor) -> Ranks:
    """Rank each video's own captions among the captions of all videos, a video's best caption standing for it.

    This is the multi-caption protocol of CLIP4Clip (`tensor_video_to_text_sim` in its metrics.py): the score of video j
    against video k's captions is the largest of them, so that the rank counts videos, not captions. Videos without a
    caption are neither queries nor competitors.

    Args:
        similarity: (N, M) scores of N texts against M videos.
        video_of_text: (N,) int64, column of the video that each text describes.

    Returns:
        Ranks of the videos that have captions, identified by their columns.

    Raises:
        ValueError: a score is NaN.
    """
    raise_on_nan(similarity, "text", "video")
    videos, group = torch.unique(video_of_text, return_inverse=True)
    best = group_maximum(similarity[:, videos], group, len(videos))
    return count_ranks(best.T, torch.arange(len(videos), device=similarity.device), videos)


def group_maximum(similarity: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the (groups, M) largest score in each group of rows; -inf for a group without rows.

    Args:
        similarity: (N, M) scores.
        group: (N,) int64, group of each row.
        groups: how many groups there are.
    """
    best = similarity.new_full((groups, similarity.shape[1]), float("-inf"))
    return best.scatter_reduce_(0, group[:, None].expand_as(similarity), similarity, reduce="amax")


def raise_on_nan(scores: Tensor, row: str, column: str) -> None:
    """Refuse scores that are not numbers: a comparison with NaN is false, so they would rank as if they were the best.

    Args:
        scores: (Q, G).
        row, column: what rows and columns are, for the message.

    Raises:
        ValueError: a score is NaN; the message says how many and where the first one is.
    """
    nan = torch.isnan(scores)
    if nan.any():
        first = nan.nonzero()[0].tolist()
        raise ValueError(
            f"{int(nan.sum())} of {nan.numel()} scores are NaN, in {int(nan.any(dim=1).sum())} rows and "
            f"{int(nan.any(dim=0).sum())} columns; the first is {row} {first[0]} against {column} {first[1]}. "
            "Look for an overflow or an empty mask in the method's score"
        )
