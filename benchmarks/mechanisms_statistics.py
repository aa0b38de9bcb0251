"""Means over seeds, their intervals, and what they say of a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the 95 % t interval; without an interval from a single seed."""

    mean: float
    half: float | None

    def text(self, sign: bool = False) -> str:
        """Return it as `12.3 [10.1, 14.5]`."""
        form = "+.1f" if sign else ".1f"
        if self.half is None:
            return format(self.mean, form)
        return f"{self.mean:{form}} [{self.mean - self.half:{form}}, {self.mean + self.half:{form}}]"

    @property
    def verdict(self) -> str:
        """Say whether the interval excludes zero."""
        if self.half is None:
            return "one seed"
        if abs(self.mean) <= self.half:
            return "not seen"
        return "appears" if self.mean > 0 else "reversed"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of values, one per seed, with its interval.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("0 seeds; an estimate needs one")
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else None
    return Estimate(fmean(values), half)
