"""Intervals and comparisons of measured values, from the stored ranks of their runs."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, mean, stdev

import torch
from torch import Tensor

from tvr_lightning.evaluation import statistics
from tvr_lightning.evaluation.rank_table import QueryKind
from tvr_lightning.evaluation.statistics import Comparison, Interval, percentile_interval
from tvr_lightning.ranks import Ranks
from tvr_lightning.reproduce.report.sources import ReportedRun, read_ranks
from tvr_lightning.reproduce.runs.card import CardDirection

RESAMPLES = 10_000
METRIC = re.compile(r"R@\d+|nDCG@\d+|MRR|MdR|MnR|RSum|SumR")
"""Metrics that can be computed again from stored ranks."""


@dataclass(frozen=True)
class Measured:
    """A metric over the seeds of a run: the interval over queries is None if no ranks are stored."""

    mean: float
    deviation: float | None
    interval: Interval | None
    seeds: int

    def __str__(self) -> str:
        """Return the value as tables show it."""
        deviation = "" if self.deviation is None else f" ± {self.deviation:.1f}"
        interval = "" if self.interval is None else f" [{self.interval.low:.1f}, {self.interval.high:.1f}]"
        return f"{self.mean:.1f}{deviation}{interval}"


def measure(runs: Sequence[ReportedRun], direction: CardDirection, metric: str) -> Measured | None:
    """Return R@K, RSum, SumR (of both directions), MnR, MdR, or accuracy over the seeds of a run, or None."""
    values = [value for run in runs if not math.isnan(value := run.value(direction, metric))]
    if not values:
        return None
    drawn = [found for run in runs if (found := _drawn(run, direction, metric)) is not None]
    interval = percentile_interval(mean(values), torch.stack(drawn).mean(0)) if drawn else None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, interval, len(values))


def compare_runs(
    first: Sequence[ReportedRun], second: Sequence[ReportedRun], direction: CardDirection, metric: str
) -> Comparison | None:
    """Compare two runs on the same queries, second minus first, each over its seeds; None if their queries differ.

    Values per query are exchanged. MdR has none: its interval is a bootstrap interval, and its p-value is NaN.
    """
    runs = [*first, *second]
    drawn = [found for run in runs if (found := _drawn(run, direction, metric)) is not None]
    if len(drawn) < len(runs) or len({run.data for run in runs}) > 1:
        return None

    def difference(values: Sequence[Tensor] | Tensor) -> Tensor:
        own = torch.stack([*values]).double()
        return own[len(first) :].mean(0) - own[: len(first)].mean(0)

    parts, groups = [], []
    for kind, part in _parts(runs[0], direction, metric):
        stored = [read_ranks(run, kind) for run in runs]
        if any(not torch.equal(ranks.index, stored[0][0].index) for ranks, _ in stored):
            return None
        parts.append(difference([_per_query(ranks, part) for ranks, _ in stored]))
        groups.append(stored[0][1])
    if metric == "MdR":
        values = torch.tensor([run.value(direction, metric) for run in runs])
        return Comparison(percentile_interval(float(difference(values)), difference(drawn)), math.nan, math.nan)
    queries = sum(map(len, parts))
    summed = torch.cat([part * (queries / len(part)) for part in parts])  # the mean is the sum of the parts' means
    return statistics.paired_comparison(summed, torch.cat(groups), resamples=RESAMPLES)


def _parts(run: ReportedRun, direction: CardDirection, metric: str) -> tuple[tuple[QueryKind, str], ...]:
    """Return the values per query that a metric adds up: kinds of queries and names of metrics joined by `+`."""
    if metric == "SumR":
        return (*_parts(run, "text_to_video", "RSum"), *_parts(run, "video_to_text", "RSum"))
    if metric == "RSum":
        metric = "+".join(name for name in run.card.metrics(direction) if name.startswith("R@"))
    return (("question" if metric == "accuracy" else direction, metric),)


def _per_query(ranks: Ranks, metrics: str) -> Tensor:
    return torch.stack([_values(ranks, *metric.partition("@")[::2]) for metric in metrics.split("+")]).sum(0)


def _values(ranks: Ranks, metric: str, k: str) -> Tensor:
    if metric in ("MnR", "MdR"):
        return ranks.expected()
    if metric == "MRR":
        return 100.0 * ranks.reciprocal()
    return 100.0 * (ranks.normalized_gain(int(k)) if metric == "nDCG" else ranks.found_within(int(k or 1)))


def _drawn(run: ReportedRun, direction: CardDirection, metric: str) -> Tensor | None:
    """Return a metric over draws of queries, or None without ranks. Both directions of SumR draw the same videos."""
    if math.isnan(run.value(direction, metric)) or not run.ranks.is_file():
        return None
    parts = _parts(run, direction, metric)
    videos = [read_ranks(run, kind)[1].unique() for kind, _ in parts]
    if not torch.equal(videos[0], videos[-1]):
        return None
    return torch.stack([_resampled(run, *part) for part in parts]).sum(0)


# A baseline is compared with many runs.
@lru_cache(maxsize=1024)
def _resampled(run: ReportedRun, kind: QueryKind, metric: str) -> Tensor:
    ranks, video = read_ranks(run, kind)
    values = _per_query(ranks, metric)
    return statistics.resample(values, video, "median" if metric == "MdR" else "mean", resamples=RESAMPLES)


def smallest_difference(recall: float, queries: float) -> float:
    """Return the smallest difference, in points, of two recalls that a test set resolves (Agresti and Caffo, 2000).

    z sqrt(2 p (1 - p) / (Q + 2)) of independent failures, where p counts one more success and failure.
    """
    share = (recall / 100 * queries + 1) / (queries + 2)
    return 100 * NormalDist().inv_cdf(0.975) * math.sqrt(2 * share * (1 - share) / (queries + 2))
