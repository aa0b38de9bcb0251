"""Ranks of scores that come in blocks, so that no matrix of all pairs is needed."""

from itertools import groupby

import torch
from torch import Tensor

from tvr_lightning.evaluation.sources import Adjustment, Block, ScoreSource, adjusted
from tvr_lightning.ranks import Ranks


def streamed_ranks(
    source: ScoreSource,
    video_of_text: Tensor,
    adjust_texts: Adjustment | None = None,
    adjust_videos: Adjustment | None = None,
) -> tuple[Ranks, Ranks]:
    """Return the ranks of N texts by row, and of the videos that have texts by column, the same on every process.

    They are those of `text_to_video_ranks` and `video_to_text_ranks`. The source (N, M) yields all texts of a video
    block in succession; `video_of_text` (N,) int64 is the column of each text's video. The first pass stores each
    text's score with its own video and ranks the videos, whose competitors are all in one column of blocks. The second
    pass counts the videos that score higher than or equal to the stored score. Scores are bitwise identical in both
    passes, and a match is excluded from its own comparison, so rounding cannot make it its own competitor.
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
        scores = best[:, videos[inside] - start]
        match = (inside, torch.arange(len(inside), device=best.device))
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
