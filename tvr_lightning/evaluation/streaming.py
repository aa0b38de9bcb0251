"""Exact ranks from blocks of scores, without storing the complete matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.evaluation.sources import Adjustment, Block, ScoreSource


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
        source: Scores of N texts against M videos, (N, M).
        video_of_text: Column of each text's video, (N,) int64.
        adjust_texts: Post-processing of text-to-video scores, applied to blocks of texts against videos.
        adjust_videos: Post-processing of video-to-text scores, applied to blocks of videos against texts.

    Returns:
        Ranks of the N texts by row, and ranks of the videos that have texts by column; the same on every process.

    Raises:
        UserError: A score is NaN.
    """
    video_of_text = video_of_text.to(source.device)
    own = torch.zeros(source.queries, dtype=torch.float64, device=source.device)
    videos = _VideoCounts(source, video_of_text, adjust_videos)
    for block in source.blocks():
        rows, columns = _matches(block, video_of_text)
        own[block.rows][rows] = _adjusted(block, adjust_texts)[rows, columns].double()
        videos.add(block)
    own = source.shard.sum(own)
    better = torch.zeros(source.queries, dtype=torch.int64, device=source.device)
    tied = torch.zeros_like(better)
    for block in source.blocks():
        values, match = _adjusted(block, adjust_texts), _matches(block, video_of_text)
        threshold = own[block.rows, None].to(values.dtype)
        for counts, comparison in ((better, values > threshold), (tied, values == threshold)):
            comparison[match] = False
            counts[block.rows] += comparison.sum(1, dtype=torch.int32)  # a copy half the size of int64
    texts = Ranks(
        better=source.shard.sum(better),
        tied=source.shard.sum(tied) + 1,
        index=torch.arange(source.queries, device=source.device),
    )
    return texts, videos.ranks()


class _VideoCounts:
    """Counts for video-to-text ranks by the best caption of every video, one column of blocks at a time.

    Args:
        source: scores of N texts against M videos, all texts of a video block in succession.
        video_of_text: (N,) column of each text's video.
        adjustment: post-processing, applied to blocks of videos against texts.
    """

    def __init__(self, source: ScoreSource, video_of_text: Tensor, adjustment: Adjustment | None) -> None:
        self.source = source
        self.adjustment = adjustment
        self.videos, self.group = torch.unique(video_of_text, return_inverse=True)
        self.better = torch.zeros(len(self.videos), dtype=torch.int64, device=source.device)
        self.tied = torch.zeros_like(self.better)
        self.best: Tensor | None = None

    def add(self, block: Block) -> None:
        """Add the next block. The last texts of a video block complete the counts of its videos."""
        values = block.values
        if self.adjustment is not None:
            values = self.adjustment(values.T, block.columns, block.rows).T
        if self.best is None:
            self.best = values.new_full((len(self.videos), values.shape[1]), float("-inf"))
        group = self.group[block.rows]
        if len(group.unique()) == len(group):  # row by row, much faster than element by element
            self.best[group] = torch.maximum(self.best[group], values)
        else:
            self.best.scatter_reduce_(0, group[:, None].expand_as(values), values, reduce="amax")
        if block.rows.stop == self.source.queries:
            self._count(self.best, block.columns)
            self.best = None

    def _count(self, best: Tensor, columns: slice) -> None:
        inside = (self.videos >= columns.start) & (self.videos < columns.stop)
        own_group = inside.nonzero().flatten()
        scores = best[:, self.videos[own_group] - columns.start]
        each = torch.arange(len(own_group), device=best.device)
        threshold = scores[own_group, each]
        for counts, comparison in ((self.better, scores > threshold), (self.tied, scores == threshold)):
            comparison[own_group, each] = False
            counts[own_group] = comparison.sum(0, dtype=torch.int32).long()

    def ranks(self) -> Ranks:
        """Return the ranks of the videos that have texts, over all processes."""
        shard = self.source.shard
        return Ranks(better=shard.sum(self.better), tied=shard.sum(self.tied) + 1, index=self.videos)


def _adjusted(block: Block, adjustment: Adjustment | None) -> Tensor:
    return block.values if adjustment is None else adjustment(block.values, block.rows, block.columns)


def _matches(block: Block, video_of_text: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns, within a block, of the texts whose own video is in it."""
    own = video_of_text[block.rows]
    rows = ((own >= block.columns.start) & (own < block.columns.stop)).nonzero().flatten()
    return rows, own[rows] - block.columns.start
