"""Scores of matching and other pairs, of any method (DPDV, Fig. S1; GAID, Fig. 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit

BINS = 60


def measure_similarity(encoded: EncodedSplit) -> Arrays:
    """Return histograms and means of the scores of matching pairs and of all others.

    Returns:
        `edges` (BINS + 1,), `positive` and `negative` (BINS,) shares, `positive_mean`, `negative_mean`, and `overlap`,
        the probability in percent that another pair outscores a matching one, with ties counted half.
    """
    scores = encoded.similarity
    own = torch.zeros_like(scores, dtype=torch.bool)
    own[torch.arange(len(scores)), encoded.matching] = True
    positive, negative = scores[own].double().numpy(), np.sort(scores[~own].double().numpy())
    edges = np.linspace(float(scores.min()), float(scores.max()) + 1e-6, BINS + 1)
    below = np.searchsorted(negative, positive, side="left") + np.searchsorted(negative, positive, side="right")
    return {
        "edges": edges,
        "positive": np.histogram(positive, edges)[0] / len(positive),
        "negative": np.histogram(negative, edges)[0] / len(negative),
        "positive_mean": positive.mean(),
        "negative_mean": negative.mean(),
        "overlap": 100 * (1 - below.mean() / (2 * max(len(negative), 1))),
    }


def draw_similarity(arrays: Arrays) -> Iterator[Chart]:
    """Draw both histograms over one axis."""
    (axis,) = new_panels(1)
    axis.stairs(arrays["positive"], arrays["edges"], fill=True, alpha=0.5, color=COLORS[0], label="matching pairs")
    axis.stairs(arrays["negative"], arrays["edges"], fill=True, alpha=0.5, color=COLORS[1], label="all other pairs")
    axis.set(xlabel="score before post-processing", ylabel="share of the pairs")
    axis.legend()
    alt = "Two histograms of scores: of texts with their own videos, and of texts with other videos."
    facts = [
        f"mean of matching pairs: {arrays['positive_mean']:.3g}",
        f"mean of other pairs: {arrays['negative_mean']:.3g}",
        f"chance that another pair outscores a matching one: {arrays['overlap']:.3g} %",
    ]
    note = "DPDV, Fig. S1, and GAID, Fig. 6, also show those of a baseline: see the pages of the tables."
    yield Chart("", drawings([axis], alt), facts, note)
