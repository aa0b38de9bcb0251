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
    Statistic,
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


def per_query(metric: str) -> tuple[PerQuery, Statistic] | None:
    """Return the per-query values of a metric of one direction and what is taken of them; None where there are none.

    Args:
        metric: R@K, RSum (the recalls at 1, 5 and 10 added up), MnR, MdR, or accuracy.
    """
    if metric == "accuracy":
        return recall_values(1), "mean"
    if metric.startswith("R@"):
        return recall_values(int(metric[2:])), "mean"
    if metric == "RSum":
        return lambda ranks: torch.stack([recall_values(k)(ranks) for k in RECALLS]).sum(0), "mean"
    if metric in ("MnR", "MdR"):
        return Ranks.expected, "mean" if metric == "MnR" else "median"
    return None


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
    drawn = [_drawn(card, folder, direction, metric) for card in cards]
    parts = [each for each in drawn if each is not None]
    interval = percentile_interval(mean(known), torch.stack(parts).mean(0)) if parts else None
    return Measured(mean(known), stdev(known) if len(known) > 1 else None, interval, len(known))


def _drawn(card: Card, folder: Path, direction: CardDirection, metric: str) -> Tensor | None:
    """The metric over draws of queries; both directions of SumR draw the same videos."""
    if (card.accuracy() is None) == (metric == "accuracy"):
        return None
    if metric == "SumR":
        texts, videos = (_drawn(card, folder, each, "RSum") for each in ("text_to_video", "video_to_text"))
        return texts + videos if texts is not None and videos is not None and _same_videos(card, folder) else None
    if per_query(metric) is None:
        return None
    return _resampled(card.key, folder, _written(card, folder), _query_kind(direction, metric), metric)


# A baseline is read and drawn for every run that is compared with it, and a run for every metric.
@lru_cache(maxsize=256)
def _resampled(key: str, folder: Path, written: int, kind: QueryKind, metric: str) -> Tensor:
    found = per_query(metric)
    assert found is not None
    values_of, statistic = found
    ranks, video = _read(key, folder, written, kind)
    return resample(values_of(ranks), video, statistic, resamples=RESAMPLES)


@lru_cache(maxsize=256)
def _read(key: str, folder: Path, _written: int, kind: QueryKind) -> tuple[Ranks, Tensor]:
    return read_ranks(key, folder, kind)


def _ranks(card: Card, folder: Path, kind: QueryKind) -> tuple[Ranks, Tensor]:
    return _read(card.key, folder, _written(card, folder), kind)


def _written(card: Card, folder: Path) -> int:
    """When a run's ranks were written: made again, they are read again."""
    return ranks_path(card_path(folder, card.key)).stat().st_mtime_ns


def _query_kind(direction: CardDirection, metric: str) -> QueryKind:
    return "question" if metric == "accuracy" else direction


def _same_videos(card: Card, folder: Path) -> bool:
    texts, videos = (_ranks(card, folder, each)[1].unique() for each in ("text_to_video", "video_to_text"))
    return torch.equal(texts, videos)


def _value(card: Card, direction: CardDirection, metric: str) -> float | None:
    if metric == "accuracy":
        return card.accuracy()
    if metric == "SumR" and card.accuracy() is None:
        return float(card.results["sum_of_recalls"]) if card.results else None
    return card.metrics(direction).get(metric)


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
    cards = [*first, *second]
    if any((card.accuracy() is None) == (metric == "accuracy") for card in cards) or len(set(map(_data, cards))) > 1:
        return None
    stored = [_ranks(card, folder, _query_kind(direction, metric)) for card in cards]
    if any(not torch.equal(ranks.index, stored[0][0].index) for ranks, _ in stored):
        return None
    drawn = [_drawn(card, folder, direction, metric) for card in cards]
    parts = [each for each in drawn if each is not None]
    if len(parts) < len(cards):
        return None
    difference = torch.stack(parts[len(first) :]).mean(0) - torch.stack(parts[: len(first)]).mean(0)
    one, other = (
        mean(value for value in (_value(card, direction, metric) for card in side) if value is not None)
        for side in (first, second)
    )
    return Comparison(percentile_interval(other - one, difference), _p_value(first, second, folder, direction, metric))


def _p_value(
    first: Sequence[Card], second: Sequence[Card], folder: Path, direction: CardDirection, metric: str
) -> float:
    if metric == "MdR":
        return math.nan
    if metric != "SumR":
        one, group = _averaged(first, folder, direction, metric)
        other, _ = _averaged(second, folder, direction, metric)
        return exchange_p_value(other - one, group, resamples=RESAMPLES)
    # A video's share of SumR: that of its texts and its own.
    shares, groups = [], []
    for each in ("text_to_video", "video_to_text"):
        one, group = _averaged(first, folder, each, "RSum")
        other, _ = _averaged(second, folder, each, "RSum")
        shares.append((other - one) / len(group))
        groups.append(group)
    return exchange_p_value(torch.cat(shares), torch.cat(groups), resamples=RESAMPLES)


def _averaged(cards: Sequence[Card], folder: Path, direction: CardDirection, metric: str) -> tuple[Tensor, Tensor]:
    """Per-query values over seeds, and the video of each query."""
    found = per_query(metric)
    assert found is not None
    stored = [_ranks(card, folder, _query_kind(direction, metric)) for card in cards]
    return torch.stack([found[0](ranks) for ranks, _ in stored]).mean(0), stored[0][1]


def _data(card: Card) -> str:
    return str(card.run["fingerprints"]["data"])


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
