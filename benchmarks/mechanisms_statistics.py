"""Means over seeds, their intervals, and what they say of a claim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, 97.5 %, for 1 to 9 degrees of freedom."""


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
        ValueError: no value, or more than ten.
    """
    if not 1 <= len(values) <= len(T_975) + 1:
        raise ValueError(f"{len(values)} seeds; the intervals are for 1 to {len(T_975) + 1}")
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Estimate(mean, None)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return Estimate(mean, T_975[len(values) - 2] * deviation / math.sqrt(len(values)))
