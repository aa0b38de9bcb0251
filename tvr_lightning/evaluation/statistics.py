"""How far a figure would move with other queries: bootstrap intervals and paired tests over per-query values.

Queries are resampled, not training runs: an interval says nothing about seeds. Captions of one video rise and fall
together, so that where a video has several of them, videos are resampled (`group`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.evaluation.ranks import Ranks

PerQuery = Callable[[Ranks], Tensor]

CHUNK = 256  # resamples drawn at a time: 256 x 100,000 queries are 0.2 GB


@dataclass
class Interval:
    """A figure with its percentile bootstrap interval.

    Attributes:
        estimate: the figure itself, in the unit of the per-query values.
        low, high: ends of the interval.
        confidence: share of resamples inside, in (0, 1).
    """

    estimate: float
    low: float
    high: float
    confidence: float


@dataclass
class Comparison:
    """The difference of two systems on the same queries.

    Attributes:
        difference: second minus first, with its interval.
        p_value: two-sided, of a test that exchanges the systems at random, query by query.
    """

    difference: Interval
    p_value: float


def recall_values(k: int) -> PerQuery:
    """Return the per-query values whose mean is R@K in percent."""
    return lambda ranks: 100.0 * ranks.found_within(k)


def bootstrap_interval(
    ranks: Ranks,
    values: PerQuery,
    *,
    group: Tensor | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a mean over queries (Efron, 1979).

    Args:
        ranks: ranks of Q queries.
        values: the (Q,) per-query values whose mean is the figure, such as `recall_values(1)` or `Ranks.expected`.
        group: (Q,) int64, queries with the same number are drawn together, such as the captions of one video.
        resamples: how many resamples to draw.
        confidence: share of resamples inside the interval, in (0, 1).
        seed: of the draws.

    Raises:
        ValueError: there is no query, `confidence` or `resamples` is out of range, or `group` does not fit.
    """
    sums, sizes = _groups(values(ranks).double().cpu(), group)
    return _interval(sums, sizes, resamples, confidence, seed)


def compare(
    first: Ranks,
    second: Ranks,
    values: PerQuery,
    *,
    group: Tensor | None = None,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two systems on the same queries: paired bootstrap interval and paired randomisation test.

    Args:
        first, second: ranks of the same Q queries, in any order.
        values: the (Q,) per-query values whose mean is compared.
        group: (Q,) int64 by rising query index; queries with the same number are drawn and exchanged together.
        resamples: how many resamples, and how many exchanges.
        confidence: share of resamples inside the interval, in (0, 1).
        seed: of the draws.

    Raises:
        ValueError: the queries differ, or an option is out of range.
    """
    first, second = first.deduplicated(), second.deduplicated()
    if not torch.equal(first.index.cpu(), second.index.cpu()):
        raise ValueError(
            f"a paired comparison needs the same queries on both sides; {len(first)} and {len(second)} were ranked, "
            f"{len(set(first.index.tolist()) & set(second.index.tolist()))} of them on both"
        )
    difference = values(second).double().cpu() - values(first).double().cpu()
    sums, sizes = _groups(difference, group)
    interval = _interval(sums, sizes, resamples, confidence, seed)
    return Comparison(interval, _randomisation_p_value(sums, resamples, seed))


def _groups(values: Tensor, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum and size of every group of queries."""
    if not len(values):
        raise ValueError("no query was ranked; there is nothing to resample")
    if group is None:
        return values, torch.ones_like(values)
    if group.shape != values.shape:
        raise ValueError(f"group must be ({len(values)},), one number per query, got {tuple(group.shape)}")
    names, inverse = torch.unique(group.cpu(), return_inverse=True)
    sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, inverse, values)
    return sums, torch.bincount(inverse, minlength=len(names)).double()


def _interval(sums: Tensor, sizes: Tensor, resamples: int, confidence: float, seed: int) -> Interval:
    if resamples < 1 or not 0 < confidence < 1:
        raise ValueError(f"need resamples >= 1 and confidence in (0, 1), got {resamples} and {confidence}")
    generator = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, resamples, CHUNK):
        drawn = torch.randint(len(sums), (min(CHUNK, resamples - start), len(sums)), generator=generator)
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    tail = (1 - confidence) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(float(sums.sum() / sizes.sum()), low, high, confidence)


def _randomisation_p_value(sums: Tensor, resamples: int, seed: int) -> float:
    """Share of random exchanges of both systems whose difference is at least as large as the one seen."""
    generator = torch.Generator().manual_seed(seed)
    # The slack keeps sums that are equal on paper, added in another order, on the side of the one seen.
    seen = float(sums.sum().abs()) - 1e-9 * float(sums.abs().sum())
    extreme = 0
    for start in range(0, resamples, CHUNK):
        draw = torch.randint(2, (min(CHUNK, resamples - start), len(sums)), generator=generator)
        extreme += int(((draw.double() * 2 - 1) @ sums).abs().ge(seen).sum())
    return (extreme + 1) / (resamples + 1)
