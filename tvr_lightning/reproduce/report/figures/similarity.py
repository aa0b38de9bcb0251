"""Figure of any method: scores of matching and other pairs (DPDV, Fig. S1; GAID, Fig. 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.reproduce.report.figures.drawing import (
    NEGATIVE,
    POSITIVE,
    Arrays,
    Chart,
    Scalar,
    new_figure,
    to_chart,
)
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit
from tvr_lightning.reproduce.report.figures.kind import FigureKind

BINS = 60


def measure_similarity(encoded: EncodedSplit) -> Arrays:
    """Return histograms and means of the scores of matching pairs and of all others.

    Returns:
        `edges` (BINS + 1,), `positive` and `negative` (BINS,) shares that add up to 1, and the scalars
        `positive_mean`, `negative_mean` and `overlap`, the chance in percent that another pair outscores a matching
        one, ties counted half.
    """
    scores = encoded.similarity
    own = torch.zeros_like(scores, dtype=torch.bool)
    own[torch.arange(len(scores)), encoded.matching] = True
    positive, negative = scores[own].double(), scores[~own].double()
    edges = np.linspace(float(scores.min()), float(scores.max()) + 1e-6, BINS + 1)
    above = np.sort(negative.numpy())
    lower = np.searchsorted(above, positive.numpy(), side="left")
    upper = np.searchsorted(above, positive.numpy(), side="right")
    return {
        "edges": edges,
        "positive": np.histogram(positive.numpy(), edges)[0] / len(positive),
        "negative": np.histogram(negative.numpy(), edges)[0] / len(negative),
        "positive_mean": np.array(float(positive.mean())),
        "negative_mean": np.array(float(negative.mean())),
        "overlap": 100 * (1 - (lower + upper).mean() / (2 * max(len(above), 1))),
    }


def draw_similarity(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw both histograms over one axis."""
    figures, (axis,) = new_figure(1)
    for name, colour in (("positive", POSITIVE), ("negative", NEGATIVE)):
        label = "matching pairs" if name == "positive" else "all other pairs"
        axis.stairs(arrays[name], arrays["edges"], fill=True, alpha=0.45, color=colour, label=label)
        axis.stairs(arrays[name], arrays["edges"], color=colour)
    axis.set_xlabel("score before post-processing")
    axis.set_ylabel("share of the pairs")
    axis.legend()
    yield to_chart(
        figures,
        f"{key}-similarity",
        "Two histograms of scores: of texts with their own videos, and of texts with other videos.",
        [
            Scalar("mean of matching pairs", "similarity.positive_mean"),
            Scalar("mean of other pairs", "similarity.negative_mean"),
            Scalar("chance that another pair outscores a matching one", "similarity.overlap", " %"),
        ],
        "DPDV, Fig. S1, and GAID, Fig. 6, also show those of a baseline: see the comparisons of runs.",
    )


FIGURES = (FigureKind("similarity", "Scores of matching and of other pairs", measure_similarity, draw_similarity),)
