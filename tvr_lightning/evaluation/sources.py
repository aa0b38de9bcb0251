"""Scores as streams of blocks, from a matrix, a method, or a post-processing, and passes over all pairs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.ranks import Ranks

Adjustment = Callable[[Tensor, slice, slice], Tensor]
TILE = 2**24  # scores of a matrix that are processed at a time


@dataclass
class ProcessShare:
    """Share of one process in an evaluation: every `world`-th block of videos, starting at `rank`.

    Attributes:
        rank, world: index of this process, and number of processes.
        gather: function that stacks the tensors of all processes to (world, ...), the same on every process.
    """

    rank: int = 0
    world: int = 1
    gather: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor[None])

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the processes, in the shape of the tensor."""
        return self.gather(tensor).sum(0)

    def logsumexp(self, tensor: Tensor) -> Tensor:
        """Return the log sum of exponentials over the processes, in the shape of the tensor."""
        return self.gather(tensor).logsumexp(0)


@dataclass
class Block:
    """Scores (r, c) of the queries in `rows` against the gallery items in `columns`."""

    values: Tensor
    rows: slice
    columns: slice


class ScoreSource(ABC):
    """Scores of Q queries against G gallery items on a device, in blocks with a fixed order and fixed shapes.

    `shard` is the share of this process in the blocks; all blocks by default.
    """

    def __init__(self, queries: int, gallery: int, device: torch.device, shard: ProcessShare | None = None) -> None:
        self.queries = queries
        self.gallery = gallery
        self.device = device
        self.shard = shard or ProcessShare()

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of this process. Together, the blocks of all processes cover every score once."""


class MatrixSource(ScoreSource):
    """Source of a matrix of scores (Q, G) in one process, in blocks of as many rows as fit into a tile."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix.shape[0], matrix.shape[1], matrix.device)
        self.matrix = matrix

    @override
    def blocks(self) -> Iterator[Block]:
        step = max(TILE // max(self.gallery, 1), 1)
        for start in range(0, self.queries, step):
            rows = slice(start, min(start + step, self.queries))
            yield Block(self.matrix[rows], rows, slice(0, self.gallery))


class TransposedSource(ScoreSource):
    """Source with queries and gallery exchanged, for video-to-text retrieval."""

    def __init__(self, source: ScoreSource) -> None:
        super().__init__(source.gallery, source.queries, source.device, source.shard)
        self.source = source

    @override
    def blocks(self) -> Iterator[Block]:
        for block in self.source.blocks():
            yield Block(block.values.T, block.columns, block.rows)


class AdjustedSource(ScoreSource):
    """Source of post-processed scores; the adjustment None keeps them."""

    def __init__(self, source: ScoreSource, adjustment: Adjustment | None) -> None:
        super().__init__(source.queries, source.gallery, source.device, source.shard)
        self.source = source
        self.adjustment = adjustment

    @override
    def blocks(self) -> Iterator[Block]:
        for block in self.source.blocks():
            yield Block(adjusted(block, self.adjustment), block.rows, block.columns)


def adjusted(block: Block, adjustment: Adjustment | None) -> Tensor:
    """Return the scores (r, c) of a block after an adjustment, if there is one."""
    return block.values if adjustment is None else adjustment(block.values, block.rows, block.columns)


def complete_matrix(source: ScoreSource) -> Tensor:
    """Return the scores (Q, G) float64 of a source whose blocks are all in this process."""
    matrix = torch.empty(source.queries, source.gallery, dtype=torch.float64, device=source.device)
    for block in source.blocks():
        matrix[block.rows, block.columns] = block.values.double()
    return matrix


def gallery_logsumexp(source: ScoreSource, scale: float, query_weights: Tensor | None = None) -> Tensor:
    """Return the log sums over all queries of exp(scale * score + weight of the query), (G,) float64.

    Scores are (Q, G), `query_weights` are logarithms (Q,), zero by default.
    """
    total = torch.full((source.gallery,), float("-inf"), dtype=torch.float64, device=source.device)
    for block in source.blocks():
        values = block.values.double() * scale
        if query_weights is not None:
            values += query_weights[block.rows, None]
        total[block.columns] = torch.logaddexp(total[block.columns], values.logsumexp(0))
    return source.shard.logsumexp(total)


def query_logsumexp(source: ScoreSource, scale: float, gallery_weights: Tensor | None = None) -> Tensor:
    """Return log sums (Q,) over the gallery of exp(scale * score + log weight of the item)."""
    return gallery_logsumexp(TransposedSource(source), scale, gallery_weights)


def best_of_gallery(source: ScoreSource, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores (Q, min(k, G)) float64 of each query, best first, and their gallery items."""
    k = min(k, source.gallery)
    scores = torch.full((source.queries, k), float("-inf"), dtype=torch.float64, device=source.device)
    items = torch.zeros(source.queries, k, dtype=torch.int64, device=source.device)
    for block in source.blocks():
        columns = torch.arange(block.columns.start, block.columns.stop, device=source.device)
        candidates = torch.cat([scores[block.rows], block.values.double()], dim=1)
        numbers = torch.cat([items[block.rows], columns.expand(len(block.values), -1)], dim=1)
        scores[block.rows], place = candidates.topk(k, dim=1)
        items[block.rows] = numbers.gather(1, place)
    all_scores, all_items = (source.shard.gather(part).transpose(0, 1).flatten(1) for part in (scores, items))
    best, place = all_scores.topk(k, dim=1)
    return best, all_items.gather(1, place)


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
