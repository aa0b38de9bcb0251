"""Intervals and paired tests over per-query values.

Queries are random, not training runs, so intervals do not cover the variation between seeds. Values of captions of one
video are correlated, so for several captions per video, videos are the random units (`group`).

scipy.stats is not used: its permutation test takes about seven times as long for a thousand queries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

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


@dataclass
class Comparison:
    """Difference of two systems on the same queries, second minus first, and its two-sided p-value.

    `detectable` is the true difference that such a test set shows with 80 % power.
    """

    difference: Interval
    p_value: float
    detectable: float


def proportion_interval(values: Tensor, group: Tensor | None = None, weight: Tensor | None = None) -> Interval:
    """Return the weighted mean of values (Q,), 0 to 1, with Wilson's (1927) 95 % interval for `effective_queries`."""
    totals, sizes = _group_sums(values, group, weight)
    share = float(totals.sum() / sizes.sum())
    return Interval(share, *wilson_interval(share, effective_queries(values, group, weight)))


def wilson_interval(share: float, queries: float) -> tuple[float, float]:
    """Return the shares that a score test at the 5 % level does not reject (Wilson, 1927)."""
    z = NormalDist().inv_cdf(0.975)
    half = z * math.sqrt(share * (1 - share) / queries + (z / (2 * queries)) ** 2)
    middle, total = share + z * z / (2 * queries), 1 + z * z / queries
    return max((middle - half) / total, 0.0), min((middle + half) / total, 1.0)


def median_interval(values: Tensor, group: Tensor | None = None) -> Interval:
    """Return the median of values (Q,) with the 95 % interval of Woodruff (1952): the values around half of them."""
    middle = values.quantile(0.5)
    ends = wilson_interval(0.5, effective_queries((values <= middle).double(), group))
    return Interval(float(middle), *values.quantile(values.new_tensor(ends)).tolist())


def effective_queries(values: Tensor, group: Tensor | None = None, weight: Tensor | None = None) -> float:
    """Return the number of independent right or wrong queries that would estimate a mean as precisely.

    This is p (1 - p) divided by the variance of the mean p over groups (Kish's design effect). Few groups that differ
    from the others, or none, do not determine this variance. So it is averaged over these groups and one more, in which
    all values agree. For one binary value per group, the result is the number of queries. `values` (Q,) are from 0 to
    1. `group` (Q,) is, for example, the video of each query; by default, queries are independent with equal `weight`.
    """
    totals, sizes = _group_sums(values, group, weight)
    share = totals.sum() / sizes.sum()
    together = float((totals - share * sizes).square().sum() / (share * (1 - share)).clamp(min=1e-12))
    rounding = 1e-9 * sizes
    deciding = int(min((totals > rounding).sum(), (totals < sizes - rounding).sum()))
    spread = (deciding * together + float(sizes.square().sum())) / (deciding + 1)
    return float(sizes.sum()) ** 2 / spread


def _group_sums(values: Tensor, group: Tensor | None, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the sums of the weighted values and of the weights in each group; groups are in ascending order."""
    if not len(values):
        raise UserError("No query was ranked, so there is nothing to compare.")
    values = values.double().cpu()
    weight = torch.ones_like(values) if weight is None else weight.double().cpu()
    if group is None:
        return values * weight, weight
    names, inverse = torch.unique(group.cpu(), return_inverse=True)
    sums = values.new_zeros(2, len(names)).index_add_(1, inverse, torch.stack([values * weight, weight]))
    return sums[0], sums[1]


@lru_cache(maxsize=1)
def _kept_signs(groups: int, resamples: int) -> list[Tensor]:
    return list(_signs(groups, resamples))


def _signs(groups: int, resamples: int) -> Iterator[Tensor]:
    """Yield 1 for each group that keeps its values and -1 for each that exchanges them, (R, groups) int8 per item."""
    generator = torch.Generator().manual_seed(0)
    rows = max(DRAWS // groups, 1)
    for start in range(0, resamples, rows):
        drawn = torch.randint(2, (min(rows, resamples - start), groups), generator=generator)
        yield (drawn * 2 - 1).to(torch.int8)


def paired_comparison(difference: Tensor, group: Tensor | None = None, *, resamples: int = 10_000) -> Comparison:
    """Compare two systems by random exchanges of their values, group by group.

    `difference` (Q,) is the second system's value per query minus the first's. The p-value is the share of exchanges
    with a mean difference at least as large. The 95 % interval contains the mean differences that this test would not
    reject (Garthwaite, 1996), so it excludes zero exactly if p is below 0.05. Fewer than six groups make it infinite.
    """
    sums, sizes = _group_sums(difference, group)
    total, queries = sums.sum(), sizes.sum()
    rounding = 1e-9 * sums.abs().sum()
    exchanges = (_kept_signs if len(sums) * resamples <= DRAWS else _signs)(len(sums), resamples)
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
    interval = Interval(float(total / queries), low, high)
    return Comparison(interval, (extreme + 1) / (resamples + 1), detectable_difference(difference, group))


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
    return [float(p_value) for p_value in corrected]


def detectable_difference(difference: Tensor, group: Tensor | None = None, power: float = 0.8) -> float:
    """Return the true mean difference that test sets like this one show at the 5 % level with a probability of `power`.

    `difference` (Q,) is the second system's value per query minus the first's. The result is the standard error times
    the sum of the quantiles for 97.5 % and `power`; for 50 % it is about half the width of the 95 % interval.
    """
    sums, sizes = _group_sums(difference, group)
    if len(sizes) < 2:
        return math.inf
    rest = sums - sizes * sums.sum() / sizes.sum()
    error = math.sqrt(float(rest.square().sum()) * len(sizes) / (len(sizes) - 1)) / len(difference)
    return error * float(stdtrit(len(sizes) - 1, [0.975, power]).sum())
