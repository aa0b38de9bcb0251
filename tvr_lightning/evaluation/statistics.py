"""How far a figure would move with other queries: bootstrap intervals and paired tests over per-query values.

Not by scipy.stats: its bootstrap draws no groups for a median and needs two values, its permutation test takes about
seven times as long on a thousand queries. The tests hold the results against both.

Queries are resampled, not training runs: an interval says nothing about seeds. Captions of one video rise and fall
together, so that where a video has several of them, videos are resampled (`group`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from tvr_lightning.evaluation.ranks import Ranks

PerQuery = Callable[[Ranks], Tensor]

Statistic = Literal["mean", "median"]

CHUNK = 256  # resamples drawn at a time: 256 x 100,000 queries are 0.2 GB
KEPT = 20_000_000  # draws that are kept for the next figure of a test set of the same size, 80 MB


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


def resample(
    values: Tensor,
    group: Tensor | None = None,
    statistic: Statistic = "mean",
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Tensor:
    """Return (resamples,) float64: the figure over queries that are drawn with replacement, group by group.

    The draws depend on the seed and the number of groups alone. So the figures of two systems, or of both directions of
    one, over the same groups belong together, draw by draw: their differences and sums are paired.

    Args:
        values: (Q,) per-query values.
        group: (Q,) int64, queries with the same number are drawn together, such as the captions of one video.
        statistic: of the drawn values.
        resamples: how many.
        seed: of the draws.

    Raises:
        ValueError: there is no query, `resamples` is below 1, or `group` does not fit.
    """
    values = values.double().cpu()
    inverse, sizes = _groups(values, group)
    if resamples < 1:
        raise ValueError(f"need resamples >= 1, got {resamples}")
    draws = _draws(len(sizes), resamples, seed)
    if statistic == "median":
        return torch.cat([_medians(values, inverse, counts) for counts in draws])
    sums = torch.zeros_like(sizes).index_add_(0, inverse, values)
    return torch.cat([(counts.double() @ sums) / (counts.double() @ sizes) for counts in draws])


def _medians(values: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
    """Medians of every draw: the middle one, or the mean of the middle two, of values that count `counts` times."""
    order = values.argsort()
    reached = counts[:, inverse[order]].cumsum(1)
    total = reached[:, -1:]
    middle = torch.cat([(total - 1).div(2, rounding_mode="floor"), total.div(2, rounding_mode="floor")], dim=1)
    return values[order][torch.searchsorted(reached, middle, right=True)].mean(1)


def _draws(groups: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each group is drawn: (at most CHUNK, groups) float32 at a time."""
    if groups * resamples > KEPT:
        return _drawn(groups, resamples, seed)
    return iter(_kept_draws(groups, resamples, seed))


@lru_cache(maxsize=1)
def _kept_draws(groups: int, resamples: int, seed: int) -> list[Tensor]:
    return list(_drawn(groups, resamples, seed))


def _drawn(groups: int, resamples: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, resamples, CHUNK):
        drawn = torch.randint(groups, (min(CHUNK, resamples - start), groups), generator=generator)
        yield torch.zeros(drawn.shape).scatter_add_(1, drawn, torch.ones(drawn.shape))


def percentile_interval(estimate: float, drawn: Tensor, confidence: float = 0.95) -> Interval:
    """Return a figure with its percentile bootstrap interval (Efron, 1979).

    Args:
        estimate: the figure.
        drawn: (resamples,), as `resample` gives them.
        confidence: share of them inside, in (0, 1).

    Raises:
        ValueError: `confidence` is out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"need confidence in (0, 1), got {confidence}")
    tail = (1 - confidence) / 2
    low, high = drawn.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(estimate, low, high, confidence)


def effective_queries(values: Tensor, group: Tensor | None = None) -> float:
    """Return how many unrelated queries know as much about a mean as these do, whose groups rise and fall together.

    Q times the variance of the mean over unrelated queries, divided by that over groups (Kish's design effect), between
    the number of groups and Q.

    Args:
        values: (Q,) per-query values.
        group: (Q,) int64, such as the video of each caption.

    Raises:
        ValueError: there is no query, or `group` does not fit.
    """
    values = values.double().cpu()
    inverse, sizes = _groups(values, group)
    rest = values - values.mean()
    alone = float(rest.square().sum())
    together = float(torch.zeros_like(sizes).index_add_(0, inverse, rest).square().sum())
    found = len(values) * alone / together if together > 0 else float(len(sizes))
    return min(max(found, float(len(sizes))), float(len(values)))


def _groups(values: Tensor, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """The place of each query's group, by rising number, and the sizes of the groups."""
    if not len(values):
        raise ValueError("No query was ranked, so there is nothing to resample.")
    if group is None:
        return torch.arange(len(values)), torch.ones_like(values)
    if group.shape != values.shape:
        raise ValueError(f"group must be ({len(values)},), one number per query, got {tuple(group.shape)}")
    names, inverse = torch.unique(group.cpu(), return_inverse=True)
    return inverse, torch.bincount(inverse, minlength=len(names)).double()


def exchange_p_value(
    difference: Tensor, group: Tensor | None = None, *, resamples: int = 10_000, seed: int = 0
) -> float:
    """Share of random exchanges of two systems, group by group, that differ at least as much as they do.

    Args:
        difference: (Q,) per-query values of the second system minus those of the first.
        group: (Q,) int64, queries with the same number are exchanged together.
        resamples: how many exchanges.
        seed: of the draws.

    Raises:
        ValueError: there is no query, or `group` does not fit.
    """
    difference = difference.double().cpu()
    inverse, sizes = _groups(difference, group)
    sums = torch.zeros_like(sizes).index_add_(0, inverse, difference)
    generator = torch.Generator().manual_seed(seed)
    # The slack keeps sums that are equal on paper, added in another order, on the side of the one seen.
    seen = float(sums.sum().abs()) - 1e-9 * float(sums.abs().sum())
    extreme = 0
    for start in range(0, resamples, CHUNK):
        draw = torch.randint(2, (min(CHUNK, resamples - start), len(sums)), generator=generator)
        extreme += int(((draw.double() * 2 - 1) @ sums).abs().ge(seen).sum())
    return (extreme + 1) / (resamples + 1)
