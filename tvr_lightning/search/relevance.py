"""Relevance of results, calibrated on queries that were not meant for the index.

Cosines of unrelated texts and videos differ between models and indexes. The scale starts at the best cosines that a
hundred everyday sentences reach in the index. Its median and lower half ignore those that describe one of the videos.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from statistics import NormalDist

import torch
from torch import Tensor

from tvr_lightning.search.results import Answer

GOOD = 0.9
"""Default relevance of a good match: better than nine of ten unrelated queries."""
MIN_SPREAD = 1e-3  # of cosines
BACKGROUND: list[str] = json.loads((resources.files("tvr_lightning.search") / "background.json").read_text("utf-8"))
"""A hundred sentences about different everyday sights."""


@dataclass(frozen=True)
class Scale:
    """Median of the best cosines of unrelated queries, and the spread of the normal that fits the lower half."""

    middle: float
    spread: float

    @classmethod
    def fit(cls, background: Tensor, blocks: Iterable[Tensor]) -> Scale | None:
        """Fit the scale to sentences (B, D) and all vectors (M, D) of an index in blocks. None for an empty index."""
        found = [(background @ vectors.T).amax(1) for vectors in blocks]
        if not found:
            return None
        best = torch.stack(found).amax(0)
        middle = float(best.median())
        below = middle - best[best < middle]
        spread = float(below.median()) / NormalDist().inv_cdf(0.75) if len(below) else 0.0
        return cls(middle, max(spread, MIN_SPREAD))

    def relevance(self, cosine: float) -> float:
        """Return the share of unrelated queries whose best match would be weaker, 0 to 1."""
        return NormalDist(self.middle, self.spread).cdf(cosine)


def judge(answer: Answer, scale: Scale, nearest: float, min_relevance: float | None) -> None:
    """Set the relevance of each result, drop results below the minimum, and note whether anything matches well."""
    for result in answer.results:
        result.relevance = scale.relevance(result.cosine)
    answer.weak = scale.relevance(nearest) < (GOOD if min_relevance is None else min_relevance)
    if min_relevance is not None:
        answer.results = [result for result in answer.results if (result.relevance or 0.0) >= min_relevance]
        for rank, result in enumerate(answer.results, 1):
            result.rank = rank
    if answer.weak:
        answer.notes.append("nothing here matches well" + ("; these are the closest" if answer.results else ""))
