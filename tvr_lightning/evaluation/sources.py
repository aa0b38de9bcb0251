"""Scores as streams of blocks: what passes over all pairs read, whether a matrix, a method, or a post-processed one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

Adjustment = Callable[[Tensor, slice, slice], Tensor]


@dataclass
class Shard:
    """Share of an evaluation that falls to one of several processes: every `world`-th block of videos from `rank` on.

    Attributes:
        rank: place of this process.
        world: number of processes.
        gather: given a tensor, returns those of all processes stacked to (world, ...), the same on every process.
    """

    rank: int = 0
    world: int = 1
    gather: Callable[[Tensor], Tensor] = field(default=lambda tensor: tensor[None])

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the processes, of the tensor's own shape (any shape)."""
        return self.gather(tensor).sum(0)

    def logsumexp(self, tensor: Tensor) -> Tensor:
        """Return the log sum of exponentials over the processes, of the tensor's own shape (any shape)."""
        return self.gather(tensor).logsumexp(0)


@dataclass
class Block:
    """Scores (r, c) of the queries in `rows` against the gallery items in `columns`."""

    values: Tensor
    rows: slice
    columns: slice


class ScoreSource(ABC):
    """Scores of Q queries against G gallery items, in blocks that come in the same order and shape every time.

    Args:
        queries, gallery: Q and G.
        device: where blocks and results lie.
        shard: which share of the blocks this process produces; all of them where it is not given.
    """

    def __init__(self, queries: int, gallery: int, device: torch.device, shard: Shard | None = None) -> None:
        self.queries = queries
        self.gallery = gallery
        self.device = device
        self.shard = shard or Shard()

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield this process's blocks; together, the blocks of all processes cover every score once."""


class MatrixSource(ScoreSource):
    """A (Q, G) matrix of scores as a source of one block, in one process."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix.shape[0], matrix.shape[1], matrix.device)
        self.matrix = matrix

    def blocks(self) -> Iterator[Block]:
        """Yield the whole matrix."""
        yield Block(self.matrix, slice(0, self.queries), slice(0, self.gallery))


class TransposedSource(ScoreSource):
    """A source with queries and gallery exchanged: for video-to-text retrieval."""

    def __init__(self, source: ScoreSource) -> None:
        super().__init__(source.gallery, source.queries, source.device, source.shard)
        self.source = source

    def blocks(self) -> Iterator[Block]:
        """Yield the source's blocks transposed."""
        for block in self.source.blocks():
            yield Block(block.values.T, block.columns, block.rows)


class AdjustedSource(ScoreSource):
    """A source whose scores are post-processed on the way."""

    def __init__(self, source: ScoreSource, adjustment: Adjustment) -> None:
        super().__init__(source.queries, source.gallery, source.device, source.shard)
        self.source = source
        self.adjustment = adjustment

    def blocks(self) -> Iterator[Block]:
        """Yield the source's blocks with the adjustment applied."""
        for block in self.source.blocks():
            yield Block(self.adjustment(block.values, block.rows, block.columns), block.rows, block.columns)


def gallery_logsumexp(source: ScoreSource, scale: float, query_weights: Tensor | None = None) -> Tensor:
    """Return the (G,) float64 log sums over all queries of exp(scale * score + weight of the query).

    Args:
        source: the scores (Q, G).
        scale: factor of the scores, an inverse temperature.
        query_weights: (Q,) logarithms of the queries' weights; zero where not given.
    """
    total = torch.full((source.gallery,), float("-inf"), dtype=torch.float64, device=source.device)
    for block in source.blocks():
        values = block.values.double() * scale
        if query_weights is not None:
            values += query_weights[block.rows, None]
        total[block.columns] = torch.logaddexp(total[block.columns], values.logsumexp(0))
    return source.shard.logsumexp(total)


def query_logsumexp(source: ScoreSource, scale: float, gallery_weights: Tensor | None = None) -> Tensor:
    """Return the (Q,) float64 log sums over the gallery of exp(scale * score + weight of the gallery item).

    Scores are (Q, G), `gallery_weights` (G,) logarithms; zero where not given.
    """
    return gallery_logsumexp(TransposedSource(source), scale, gallery_weights)


def best_of_gallery(source: ScoreSource, k: int) -> Tensor:
    """Return the (Q, min(k, G)) int64 gallery items that score highest for each query, best first.

    Args:
        source: the scores.
        k: how many, at least 1.
    """
    k = min(k, source.gallery)
    scores = torch.full((source.queries, k), float("-inf"), dtype=torch.float64, device=source.device)
    items = torch.zeros(source.queries, k, dtype=torch.int64, device=source.device)
    for block in source.blocks():
        columns = torch.arange(block.columns.start, block.columns.stop, device=source.device)
        candidates = torch.cat([scores[block.rows], block.values.double()], dim=1)
        numbers = torch.cat([items[block.rows], columns.expand(len(block.values), -1)], dim=1)
        scores[block.rows], place = candidates.topk(k, dim=1)
        items[block.rows] = numbers.gather(1, place)
    all_scores, all_items = source.shard.gather(scores), source.shard.gather(items)
    _, place = all_scores.transpose(0, 1).flatten(1).topk(k, dim=1)
    return all_items.transpose(0, 1).flatten(1).gather(1, place)
