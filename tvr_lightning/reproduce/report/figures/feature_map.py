"""Two-dimensional maps of words and frames by t-SNE (TC-MGC, Fig. 10)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from matplotlib import colormaps
from torch import Tensor

from tvr_lightning.reproduce.report.drawing import Arrays, Chart, drawings, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit

MOST_PAIRS = 40


def measure_map(encoded: EncodedSplit) -> Arrays:
    """Return maps `words` and `frames` (K, 2) of the tokens of up to 40 pairs, and the pair (K,) of each token."""
    text, video = encoded.paired()
    arrays: Arrays = {}
    for name, tokens, mask in (
        ("words", text.words, text.word_mask),
        ("frames", video.frames, video.frame_mask),
    ):
        kept = mask[:MOST_PAIRS].bool()
        arrays[name] = _map(tokens[:MOST_PAIRS][kept])
        arrays[f"{name}_pair"] = torch.nonzero(kept)[:, 0].cpu().numpy()
    return arrays


def _map(tokens: Tensor) -> np.ndarray:
    from sklearn.manifold import TSNE  # takes a second, and only TC-MGC needs it

    perplexity = min(30.0, (len(tokens) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, random_state=0).fit_transform(tokens.float().cpu().numpy()))


def draw_map(arrays: Arrays) -> Iterator[Chart]:
    """Draw both maps, with one color for each pair."""
    axes = new_panels(2)
    pairs = 1 + int(arrays["words_pair"].max())
    for axis, name in zip(axes, ("words", "frames"), strict=True):
        colors = colormaps["hsv"](arrays[f"{name}_pair"] / pairs)
        axis.scatter(arrays[name][:, 0], arrays[name][:, 1], s=5, c=colors)
        axis.set(title=name, xticks=[], yticks=[])
    alt = "A map of points, one for each token, with one color for each pair of a text and a video."
    note = f"TC-MGC, Fig. 10: t-SNE of the words and the frames of {pairs} pairs, one color each."
    yield Chart("", drawings(axes, alt), note=note)
