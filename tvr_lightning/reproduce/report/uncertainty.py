"""Intervals and comparisons of measured values, from the stored ranks of their runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, mean, stdev

import torch

from tvr_lightning.evaluation.intervals import QueryValues, metric_interval
from tvr_lightning.evaluation.statistics import Comparison, Interval, paired_comparison
from tvr_lightning.reproduce.report.sources import ReportedRun, read_ranks
from tvr_lightning.reproduce.runs.card import CardDirection

RESAMPLES = 10_000


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
    runs = [run for run in runs if not math.isnan(run.value(direction, metric))]
    if not runs:
        return None
    values = [run.value(direction, metric) for run in runs]
    queries = _query_values(runs, direction, metric)
    interval = metric_interval(queries, metric) if queries else None
    return Measured(mean(values), stdev(values) if len(values) > 1 else None, interval, len(values))


def compare_runs(
    first: Sequence[ReportedRun], second: Sequence[ReportedRun], direction: CardDirection, metric: str
) -> Comparison | None:
    """Compare two runs on the same queries, second minus first, each over its seeds.

    None if their queries differ, or for MdR, which is not a mean of values per query.
    """
    runs = [*first, *second]
    if metric == "MdR" or any(math.isnan(run.value(direction, metric)) for run in runs):
        return None
    if (queries := _query_values(runs, direction, metric)) is None:
        return None
    values = torch.stack([own.scale * own.values * own.weight for own in queries])
    difference = values[len(first) :].mean(0) - values[: len(first)].mean(0)
    return paired_comparison(difference, queries[0].video, resamples=RESAMPLES)


def _query_values(runs: Sequence[ReportedRun], direction: CardDirection, metric: str) -> list[QueryValues] | None:
    """Return the values per query of each run; None if the ranks of one are missing or the queries differ."""
    if len({run.data for run in runs}) > 1 or not all(run.ranks.is_file() for run in runs):
        return None
    columns = runs[0].card.metrics(direction)
    found = [QueryValues.of(partial(read_ranks, run), direction, metric, columns) for run in runs]
    return found if all(torch.equal(own.index, found[0].index) for own in found) else None


def smallest_difference(recall: float, queries: float) -> float:
    """Return the smallest difference, in points, of two recalls that a test set resolves (Agresti and Caffo, 2000).

    z sqrt(2 p (1 - p) / (Q + 2)) of independent failures, where p counts one more success and failure.
    """
    share = (recall / 100 * queries + 1) / (queries + 2)
    return 100 * NormalDist().inv_cdf(0.975) * math.sqrt(2 * share * (1 - share) / (queries + 2))
