"""Scores of matching and other pairs, of any method (DPDV, Fig. S1; GAID, Fig. 6)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, histograms, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit


def measure_similarity(encoded: EncodedSplit) -> Arrays:
    """Return histograms of the scores of `positive` and `negative` pairs.

    `overlap` is the probability in percent that another pair outscores a matching one, with ties counted half.
    """
    own = torch.zeros_like(encoded.similarity, dtype=torch.bool)
    own[torch.arange(len(own)), encoded.matching] = True
    positive, negative = (encoded.similarity[chosen].double().numpy() for chosen in (own, ~own))
    below = [np.searchsorted(np.sort(negative), positive, side) for side in ("left", "right")]
    overlap = 100 * (1 - np.mean(below) / max(len(negative), 1))
    return histograms({"positive": positive, "negative": negative}, bins=60) | {"overlap": np.array(overlap)}


def draw_similarity(arrays: Arrays) -> Iterator[Chart]:
    """Draw both histograms over one axis."""
    (axis,) = new_panels(1)
    for name, color, label in (("positive", COLORS[0], "matching pairs"), ("negative", COLORS[1], "all other pairs")):
        axis.stairs(arrays[name], arrays["edges"], fill=True, alpha=0.5, color=color, label=label)
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
