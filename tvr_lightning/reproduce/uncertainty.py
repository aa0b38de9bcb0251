"""How sure a table's figures are, from the stored ranks of its cards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, mean, stdev

import torch

from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.evaluation.statistics import (
    Comparison,
    Interval,
    PerQuery,
    bootstrap_interval,
    compare,
    recall_values,
)
from tvr_lightning.reproduce.card import Card, CardDirection, read_ranks

RESAMPLES = 10_000


@dataclass(frozen=True)
class Measured:
    """One figure of one line, over the seeds of its run.

    Attributes:
        mean: over seeds.
        deviation: over seeds, None with one.
        interval: over queries, of the per-query values averaged over seeds; None where the figure is no mean of any.
        seeds: how many.
    """

    mean: float
    deviation: float | None
    interval: Interval | None
    seeds: int


def per_query(metric: str) -> PerQuery | None:
    """Return the per-query values whose mean is a metric: R@K in percent or MnR; None for any other."""
    if metric.startswith("R@"):
        return recall_values(int(metric[2:]))
    return Ranks.expected if metric == "MnR" else None


def measure(cards: Sequence[Card], folder: Path, direction: CardDirection, metric: str) -> Measured | None:
    """Return a metric over the seeds of a run, with its interval.

    Args:
        cards: finished runs that differ in the seed alone.
        folder: of the cards.
        direction: of the metric.
        metric: such as "R@1", "MnR" or "SumR", which belongs to both directions.

    Returns:
        None where the runs do not have it.
    """
    values = [_value(card, direction, metric) for card in cards]
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    values_of = per_query(metric)
    interval = None
    if values_of is not None:
        stored = [read_ranks(card, folder, direction) for card in cards]
        averaged = torch.stack([values_of(ranks) for ranks, _ in stored]).mean(0)
        interval = bootstrap_interval(stored[0][0], lambda _: averaged, group=stored[0][1], resamples=RESAMPLES)
    return Measured(mean(known), stdev(known) if len(known) > 1 else None, interval, len(known))


def _value(card: Card, direction: CardDirection, metric: str) -> float | None:
    if metric == "accuracy":
        return card.accuracy()
    if metric == "SumR" and card.accuracy() is None:
        return float(card.results["sum_of_recalls"]) if card.results else None
    return card.metrics(direction).get(metric)


def compare_runs(first: Card, second: Card, folder: Path, direction: CardDirection, metric: str) -> Comparison | None:
    """Compare two runs on the same queries, second minus first.

    Args:
        first, second: finished runs.
        folder: of the cards.
        direction: of the metric.
        metric: R@K or MnR.

    Returns:
        None where they did not rank the same queries, or the metric is no mean over queries.
    """
    values_of = per_query(metric)
    (one, group), (other, _) = (read_ranks(card, folder, direction) for card in (first, second))
    if values_of is None or not torch.equal(one.index, other.index) or _data(first) != _data(second):
        return None
    return compare(one, other, values_of, group=group, resamples=RESAMPLES)


def _data(card: Card) -> str:
    return str(card.run["fingerprints"]["data"])


def smallest_difference(recall: float, queries: int, confidence: float = 0.95) -> float:
    """Return the smallest difference of two recalls that a test set resolves when both fail on unrelated queries.

    Half the width of the interval of the difference of two shares, z sqrt(2 p (1 - p) / (Q + 2)), where p counts one
    success and one failure more so that it holds near 0 and 100 % (Agresti and Caffo, 2000). Systems that fail on the
    same queries resolve smaller ones; `compare_runs` measures it where both were run.

    Args:
        recall: of both, in percent.
        queries: Q.
        confidence: of the interval, in (0, 1).

    Returns:
        In points of percent.

    Raises:
        ValueError: there is no query, or the recall is no percentage.
    """
    if queries < 1 or not 0 <= recall <= 100:
        raise ValueError(f"needs at least one query and a recall in percent, got {queries} and {recall}")
    share = (recall / 100 * queries + 1) / (queries + 2)
    return 100 * NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(2 * share * (1 - share) / (queries + 2))
