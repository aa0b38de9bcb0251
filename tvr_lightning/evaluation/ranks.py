"""Ranks of queries as counts of gallery items that score higher than the match and that score the same.

Counts add up over blocks and processes. With ties the rank is random, and its expectation and the probability of being
among the first K follow from both counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.sources import Adjustment, Block, ScoreSource, adjusted
from tvr_lightning.features import FeatureBatch, first_of_each


@dataclass
class Ranks(FeatureBatch):
    """Ranks of the matches of Q queries.

    Attributes:
        better: (Q,) int64, number of gallery items that score strictly higher than the match.
        tied: (Q,) int64, number of gallery items that score the same as the match, including the match (at least 1).
        index: (Q,) int64, identity of each query: the index of the text or video in its split, or -1 if it is unknown.
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
        """Return every query once, sorted by `index`; all queries whose index is unknown are kept.

        Padded samplers and gathering over processes repeat some. Raises UserError if a query has two different ranks.
        """
        index = torch.where(self.index < 0, -1 - torch.arange(len(self), device=self.index.device), self.index)
        distinct = self[first_of_each(index)]
        first = distinct[index.unique(return_inverse=True)[1]]
        differs = (first.better != self.better) | (first.tied != self.tied)
        if differs.any():
            raise UserError(f"query {int(index[differs][0])} has two different ranks. Give each query its own index.")
        return distinct


def count_ranks(scores: Tensor, match: Tensor, index: Tensor | None = None) -> Ranks:
    """Rank each query's match (Q,) in scores (Q, G). Raise UserError if a score is NaN.

    Without `index` (Q,), all queries are distinct from those of other batches.
    """
    raise_on_nan(scores, "query", "gallery item")
    own = scores.gather(1, match[:, None])
    index = torch.full_like(match, -1) if index is None else index
    return Ranks(better=(scores > own).sum(dim=1), tied=(scores == own).sum(dim=1), index=index)


def text_to_video_ranks(similarity: Tensor, video_of_text: Tensor, index: Tensor | None = None) -> Ranks:
    """Rank each text's video (N,) in scores (N, M); each caption is a separate query, with its `index` (N,)."""
    return count_ranks(similarity, video_of_text, index)


def video_to_text_ranks(similarity: Tensor, video_of_text: Tensor, index: Tensor | None = None) -> Ranks:
    """Rank each video's captions in scores (N, M), with a video represented by its best caption, and its `index` (M,).

    The multi-caption protocol of CLIP4Clip (`tensor_video_to_text_sim` in its metrics.py): ranks count videos, not
    captions. Videos without a caption are neither queries nor competitors.
    """
    raise_on_nan(similarity, "text", "video")
    videos, group = torch.unique(video_of_text, return_inverse=True)
    best = similarity.new_full((len(videos), len(videos)), float("-inf"))
    best.scatter_reduce_(0, group[:, None].expand(-1, len(videos)), similarity[:, videos], reduce="amax")
    own = torch.arange(len(videos), device=similarity.device)
    return count_ranks(best.T, own, None if index is None else index[videos])


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


def streamed_ranks(
    source: ScoreSource,
    video_of_text: Tensor,
    adjust_texts: Adjustment | None = None,
    adjust_videos: Adjustment | None = None,
) -> tuple[Ranks, Ranks]:
    """Compute the ranks of `text_to_video_ranks` and `video_to_text_ranks` in two passes over the blocks.

    The first pass stores each text's score with its own video and ranks the videos, whose competitors are all in one
    column of blocks. The second pass counts the videos that score higher than or equal to the stored score. Scores are
    bitwise identical in both passes, and a match is excluded from its own comparison, so rounding cannot make it its
    own competitor.

    Args:
        source: Scores of N texts against M videos, (N, M), all texts of a video block in succession.
        video_of_text: Column of each text's video, (N,) int64.
        adjust_texts: Post-processing of text-to-video scores, applied to blocks of texts against videos.
        adjust_videos: Post-processing of video-to-text scores, applied to blocks of videos against texts.

    Returns:
        Ranks of the N texts by row, and ranks of the videos that have texts by column; the same on every process.
    """
    video_of_text = video_of_text.to(source.device)
    videos, group = torch.unique(video_of_text, return_inverse=True)
    own = torch.zeros(source.queries, dtype=torch.float64, device=source.device)
    text_counts = torch.zeros(2, source.queries, dtype=torch.int64, device=source.device)
    video_counts = torch.zeros(2, len(videos), dtype=torch.int64, device=source.device)
    for start, blocks in groupby(source.blocks(), key=lambda block: block.columns.start):
        best: Tensor | None = None  # of each video's captions with the videos of this column of blocks
        for block in blocks:
            rows, columns = _matches(block, video_of_text)
            own[block.rows][rows] = adjusted(block, adjust_texts)[rows, columns].double()
            values = block.values
            if adjust_videos is not None:
                values = adjust_videos(values.T, block.columns, block.rows).T
            if best is None:
                best = values.new_full((len(videos), values.shape[1]), float("-inf"))
            captions = group[block.rows]
            if len(captions.unique()) == len(captions):  # row by row, much faster than element by element
                best[captions] = torch.maximum(best[captions], values)
            else:
                best.scatter_reduce_(0, captions[:, None].expand_as(values), values, reduce="amax")
        assert best is not None
        inside = ((videos >= start) & (videos < start + best.shape[1])).nonzero().flatten()
        scores, match = best[:, videos[inside] - start], (inside, torch.arange(len(inside), device=best.device))
        video_counts[:, inside] = _counts(scores, scores[match], match, dim=0)
    own = source.shard.sum(own)
    for block in source.blocks():
        values = adjusted(block, adjust_texts)
        threshold = own[block.rows, None].to(values.dtype)
        text_counts[:, block.rows] += _counts(values, threshold, _matches(block, video_of_text), dim=1)
    (text_better, text_tied), (video_better, video_tied) = map(source.shard.sum, (text_counts, video_counts))
    return (
        Ranks(text_better, text_tied + 1, torch.arange(source.queries, device=source.device)),
        Ranks(video_better, video_tied + 1, videos),
    )


def _counts(values: Tensor, threshold: Tensor, match: tuple[Tensor, Tensor], dim: int) -> Tensor:
    """Count the scores above and equal to the threshold, (2, n), without the matches."""
    counts = []
    for comparison in (values > threshold, values == threshold):
        comparison[match] = False
        counts.append(comparison.sum(dim, dtype=torch.int32))  # a copy half the size of int64
    return torch.stack(counts).long()


def _matches(block: Block, video_of_text: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns, within a block, of the texts whose own video is in it."""
    own = video_of_text[block.rows]
    rows = ((own >= block.columns.start) & (own < block.columns.stop)).nonzero().flatten()
    return rows, own[rows] - block.columns.start
