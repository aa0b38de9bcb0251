"""Bootstrap intervals and paired tests over per-query values.

Queries are resampled, not training runs, so intervals do not cover the variation between seeds. Values of captions of
one video are correlated, so for several captions per video, videos are resampled (`group`).

scipy.stats is not used: its bootstrap does not resample groups for a median, and its permutation test takes about seven
times as long for a thousand queries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from tvr_lightning.errors import UserError

# Draws at a time, 240 MB, in few large operations, since each of many small ones waits for all threads. So many are
# also cached for the next metric of a test set of the same size.
DRAWS = 20_000_000


@dataclass
class Interval:
    """Value with the ends of its interval."""

    estimate: float
    low: float
    high: float
    confidence: float = 0.95


@dataclass
class Comparison:
    """Difference of two systems on the same queries, second minus first, and its two-sided p-value.

    `detectable` is the true difference that such a test set shows with 80 % power.
    """

    difference: Interval
    p_value: float
    detectable: float


def resample(
    values: Tensor,
    group: Tensor | None = None,
    statistic: Literal["mean", "median"] = "mean",
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Tensor:
    """Return the statistic (resamples,) of values (Q,) sampled with replacement, group by group.

    Draws depend only on the seed and the number of groups, so that results of two systems on the same queries are
    paired. Queries of one group, such as captions of a video, are sampled together.
    """
    values = values.double().cpu()
    inverse, sizes = _groups(values, group)
    draws = (_kept_draws if len(sizes) * resamples <= DRAWS else _draws)(len(sizes), resamples, seed)
    if statistic == "median":
        return torch.cat([_medians(values, inverse, counts) for counts in draws])
    sums = torch.zeros_like(sizes).index_add_(0, inverse, values)
    totals = torch.cat([counts.double() @ torch.stack([sums, sizes], dim=1) for counts in draws])
    return totals[:, 0] / totals[:, 1]


def _medians(values: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
    """Return the median of every draw (mean of the middle two if even) of values that count `counts` times."""
    order = values.argsort()
    reached = counts[:, inverse[order]].cumsum(1)
    middle = torch.cat([reached[:, -1:] - 1, reached[:, -1:]], dim=1).div(2, rounding_mode="floor")
    return values[order][torch.searchsorted(reached, middle, right=True)].mean(1)


@lru_cache(maxsize=1)
def _kept_draws(groups: int, resamples: int, seed: int) -> list[Tensor]:
    return list(_draws(groups, resamples, seed))


def _draws(groups: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield the number of times each group is drawn, (R, groups) float32 per item."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(DRAWS // groups, 1)
    for start in range(0, resamples, rows):
        drawn = torch.randint(groups, (min(rows, resamples - start), groups), generator=generator)
        yield torch.zeros(drawn.shape).scatter_add_(1, drawn, torch.ones(drawn.shape))


def percentile_interval(estimate: float, drawn: Tensor) -> Interval:
    """Return a value with its percentile bootstrap interval (Efron, 1979) from resampled values, (resamples,)."""
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(estimate, low, high)


def effective_queries(values: Tensor, group: Tensor | None = None) -> float:
    """Return the number of independent queries that would estimate the mean as precisely as these grouped queries.

    Q times the variance of the mean over independent queries, divided by the variance over groups (Kish's design
    effect), between the number of groups and Q. Values and groups are (Q,).
    """
    values = values.double().cpu()
    inverse, sizes = _groups(values, group)
    rest = values - values.mean()
    alone = float(rest.square().sum())
    together = float(torch.zeros_like(sizes).index_add_(0, inverse, rest).square().sum())
    found = len(values) * alone / together if together > 0 else float(len(sizes))
    return min(max(found, float(len(sizes))), float(len(values)))


def _groups(values: Tensor, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the index of each query's group, numbered in ascending order, and the sizes of the groups."""
    if not len(values):
        raise UserError("No query was ranked, so there is nothing to resample.")
    if group is None:
        return torch.arange(len(values)), torch.ones_like(values)
    names, inverse = torch.unique(group.cpu(), return_inverse=True)
    return inverse, torch.bincount(inverse, minlength=len(names)).double()


@lru_cache(maxsize=1)
def _kept_signs(groups: int, resamples: int, seed: int) -> list[Tensor]:
    return list(_signs(groups, resamples, seed))


def _signs(groups: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield 1 for each group that keeps its values and -1 for each that exchanges them, (R, groups) int8 per item."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(DRAWS // groups, 1)
    for start in range(0, resamples, rows):
        drawn = torch.randint(2, (min(rows, resamples - start), groups), generator=generator)
        yield (drawn * 2 - 1).to(torch.int8)


def paired_comparison(
    difference: Tensor, group: Tensor | None = None, *, resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Compare two systems by random exchanges of their values, group by group.

    `difference` (Q,) is the second system's value per query minus the first's. The p-value is the share of exchanges
    with a mean difference at least as large. The 95 % interval contains the mean differences that this test would not
    reject (Garthwaite, 1996), so it excludes zero exactly if p is below 0.05. Fewer than six groups make it infinite.
    """
    difference = difference.double().cpu()
    inverse, sizes = _groups(difference, group)
    sums = torch.zeros_like(sizes).index_add_(0, inverse, difference)
    total, queries = sums.sum(), sizes.sum()
    rounding = 1e-9 * sums.abs().sum()
    exchanges = (_kept_signs if len(sums) * resamples <= DRAWS else _signs)(len(sums), resamples, seed)
    parts = torch.stack([sums, sizes], dim=1)
    drawn, counted = torch.cat([signs.double() @ parts for signs in exchanges]).T
    # |drawn - shift * counted| >= |total - shift * queries| for the shifts between both roots, or for all if 0 / 0.
    ends = torch.stack([total - drawn, total + drawn])
    ends = ends.where(ends.abs() > rounding, 0.0) / torch.stack([queries - counted, queries + counted])
    lows, highs = ends.amin(0).nan_to_num(-math.inf), ends.amax(0).nan_to_num(math.inf)
    extreme = int(((lows <= 0) & (highs >= 0)).sum())
    # The observed values count as one of the exchanges.
    kept = math.ceil(0.05 * (resamples + 1)) - 1
    low, high = float(lows.kthvalue(kept).values), float(-(-highs).kthvalue(kept).values)
    interval, p_value = Interval(float(total / queries), low, high), (extreme + 1) / (resamples + 1)
    return Comparison(interval, p_value, detectable_difference(difference, group))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct the p-values of several tests (Holm, 1979): all below 0.05 are false in at most 5 % of such families.

    NaN, the p-value of a difference without a test, stays NaN and does not count.
    """
    given = np.asarray(p_values, dtype=float)
    tests = np.count_nonzero(~np.isnan(given))
    order = np.argsort(given)  # NaN last
    steps = given[order] * np.maximum(tests - np.arange(len(given)), 1)
    corrected = np.empty_like(given)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected.tolist()


def detectable_difference(difference: Tensor, group: Tensor | None = None, power: float = 0.8) -> float:
    """Return the true mean difference that test sets like this one show at the 5 % level with a probability of `power`.

    `difference` (Q,) is the second system's value per query minus the first's. The result is the standard error times
    the sum of the quantiles for 97.5 % and `power`; for 50 % it is about half the width of the 95 % interval.
    """
    difference = difference.double().cpu()
    inverse, sizes = _groups(difference, group)
    if len(sizes) < 2:
        return math.inf
    rest = torch.zeros_like(sizes).index_add_(0, inverse, difference - difference.mean())
    error = math.sqrt(float(rest.square().sum()) * len(sizes) / (len(sizes) - 1)) / len(difference)
    return error * float(stdtrit(len(sizes) - 1, [0.975, power]).sum())
