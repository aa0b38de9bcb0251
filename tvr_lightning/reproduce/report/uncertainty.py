"""How sure a table's figures are, from the stored ranks of its cards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, mean, stdev

import torch
from torch import Tensor

from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.evaluation.statistics import (
    Comparison,
    Interval,
    PerQuery,
    effective_queries,
    exchange_p_value,
    percentile_interval,
    recall_values,
    resample,
)
from tvr_lightning.reproduce.runs.card import Card, CardDirection, QueryKind, card_path, ranks_path, read_ranks

RESAMPLES = 10_000
RECALLS = (1, 5, 10)


@dataclass(frozen=True)
class Measured:
    """One figure of one line, over the seeds of its run.

    Attributes:
        mean: over seeds.
        deviation: over seeds, None with one.
        interval: over queries, of the figure averaged over seeds; None where no ranks per query are stored.
        seeds: how many.
    """

    mean: float
    deviation: float | None
    interval: Interval | None
    seeds: int


def measure(cards: Sequence[Card], folder: Path, direction: CardDirection, metric: str) -> Measured | None:
    """Return a metric over the seeds of a run, with its interval.

    Args:
        cards: finished runs that differ in the seed alone.
        folder: of the cards.
        direction: of the metric.
        metric: R@K, RSum (the recalls at 1, 5 and 10 added up), MnR, MdR, SumR, which belongs to both directions, or
            accuracy.

    Returns:
        None where the runs do not have it.
    """
    values = [value for card in cards if not math.isnan(value := _value(card, direction, metric))]
    if not values:
        return None
    drawn = [found for card in cards if (found := _drawn(card, folder, direction, metric)) is not None]
    interval = percentile_interval(mean(values), torch.stack(drawn).mean(0)) if drawn else None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, interval, len(values))


def compare_runs(
    first: Sequence[Card], second: Sequence[Card], folder: Path, direction: CardDirection, metric: str
) -> Comparison | None:
    """Compare two runs on the same queries, second minus first, each over its seeds.

    Args:
        first, second: finished runs, one card per seed.
        folder: of the cards.
        direction: of the metric.
        metric: as of `measure`.

    Returns:
        None where they did not rank the same queries, or the metric has no values per query. The p-value exchanges
        values per query, which a median has none of: NaN for MdR.
    """
    drawn = [_drawn(card, folder, direction, metric) for card in (*first, *second)]
    known = [found for found in drawn if found is not None]
    data = {str(card.run["fingerprints"]["data"]) for card in (*first, *second)}
    if len(known) < len(drawn) or len(data) > 1:
        return None
    shares, groups = [], []
    for kind, part in _parts(direction, metric):
        stored = [_ranks(card, folder, kind) for card in (*first, *second)]
        if any(not torch.equal(ranks.index, stored[0][0].index) for ranks, _ in stored):
            return None
        shares.append(_difference([_per_query(part)(ranks) for ranks, _ in stored], len(first)) / len(stored[0][1]))
        groups.append(stored[0][1])
    values = torch.tensor([_value(card, direction, metric) for card in (*first, *second)], dtype=torch.float64)
    interval = percentile_interval(float(_difference(values, len(first))), _difference(known, len(first)))
    if metric == "MdR":
        return Comparison(interval, math.nan)
    return Comparison(interval, exchange_p_value(torch.cat(shares), torch.cat(groups), resamples=RESAMPLES))


def _difference(values: Sequence[Tensor] | Tensor, first: int) -> Tensor:
    """Mean of all but the first values, minus the mean of those."""
    return torch.stack([*values[first:]]).double().mean(0) - torch.stack([*values[:first]]).double().mean(0)


def _value(card: Card, direction: CardDirection, metric: str) -> float:
    """A metric as the card has it; NaN where it does not."""
    accuracy = card.accuracy()
    if metric == "accuracy" or accuracy is not None:
        return math.nan if metric != "accuracy" or accuracy is None else accuracy
    if metric == "SumR":
        return float(card.results["sum_of_recalls"]) if card.results else math.nan
    return card.metrics(direction).get(metric, math.nan)


def _parts(direction: CardDirection, metric: str) -> tuple[tuple[QueryKind, str], ...]:
    """Whose values per query a metric adds up: a video's share of SumR is that of its texts and its own."""
    if metric == "SumR":
        return ("text_to_video", "RSum"), ("video_to_text", "RSum")
    return (("question" if metric == "accuracy" else direction, metric),)


def _per_query(metric: str) -> PerQuery:
    if metric == "RSum":
        return lambda ranks: torch.stack([recall_values(k)(ranks) for k in RECALLS]).sum(0)
    if metric in ("MnR", "MdR"):
        return Ranks.expected
    return recall_values(1 if metric == "accuracy" else int(metric[2:]))


def _drawn(card: Card, folder: Path, direction: CardDirection, metric: str) -> Tensor | None:
    """A metric over draws of queries, of which both directions of SumR draw the same videos; None without."""
    if math.isnan(_value(card, direction, metric)):
        return None
    parts = _parts(direction, metric)
    videos = [_ranks(card, folder, kind)[1].unique() for kind, _ in parts]
    if not torch.equal(videos[0], videos[-1]):
        return None
    return torch.stack([_resampled(card.key, folder, _written(card, folder), *part) for part in parts]).sum(0)


# A baseline is read and drawn for every run that is compared with it, and a run for every metric.
@lru_cache(maxsize=256)
def _resampled(key: str, folder: Path, written: int, kind: QueryKind, metric: str) -> Tensor:
    ranks, video = _read(key, folder, written, kind)
    return resample(_per_query(metric)(ranks), video, "median" if metric == "MdR" else "mean", resamples=RESAMPLES)


@lru_cache(maxsize=256)
def _read(key: str, folder: Path, _written: int, kind: QueryKind) -> tuple[Ranks, Tensor]:
    return read_ranks(key, folder, kind)


def _ranks(card: Card, folder: Path, kind: QueryKind) -> tuple[Ranks, Tensor]:
    return _read(card.key, folder, _written(card, folder), kind)


def _written(card: Card, folder: Path) -> int:
    """When a run's ranks were written: made again, they are read again."""
    return ranks_path(card_path(folder, card.key)).stat().st_mtime_ns


def unrelated_queries(card: Card, folder: Path, direction: CardDirection) -> tuple[int, int, float]:
    """Return the queries of a direction, their videos, and how many unrelated queries know as much about R@1.

    Args:
        card: of a finished run.
        folder: of the cards.
        direction: of the queries.
    """
    ranks, video = _ranks(card, folder, direction)
    return len(ranks), len(video.unique()), effective_queries(recall_values(1)(ranks), video)


def smallest_difference(recall: float, queries: float, confidence: float = 0.95) -> float:
    """Return the smallest difference of two recalls that a test set resolves when both fail on unrelated queries.

    Half the width of the interval of the difference of two shares, z sqrt(2 p (1 - p) / (Q + 2)), where p counts one
    success and one failure more so that it holds near 0 and 100 % (Agresti and Caffo, 2000). Systems that fail on the
    same queries resolve smaller ones; `compare_runs` measures it where both were run.

    Args:
        recall: of both, in percent.
        queries: Q, unrelated ones.
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
