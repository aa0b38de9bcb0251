"""Figures of TC-MGC: attention over frames (Fig. 11), the contrasts and weights of LSA (13)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes

from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.methods import NCL, TCMGC
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.pairwise import DensePairVectors
from tvr_lightning.reproduce.report.drawing import (
    COLOURS,
    Arrays,
    Chart,
    Fact,
    escape,
    new_figure,
    to_chart,
)
from tvr_lightning.reproduce.report.material import Material

TITLE = "Attention of sentence and words over frames"
_MARKS = {"<start_of_text>": "(start)", "<end_of_text>": "(end)"}
ATTENDED = 2
"""Pairs whose attention is shown."""


def tcmgc_of(module: RetrievalModule) -> TCMGC | None:
    """Return the TC-MGC that a method is or trains through NCL; None where there is none."""
    method = module.base if isinstance(module, NCL) else module
    return method if isinstance(method, TCMGC) else None


def attends(module: RetrievalModule) -> bool:
    """Whether a method is a TC-MGC whose videos are conditioned on texts."""
    method = tcmgc_of(module)
    return method is not None and method.head.attention is not None


@torch.no_grad()
def measure_contrasts(material: Material) -> Arrays:
    """Return the contrasts' scores of matching pairs, and the weights of their aggregation.

    Args:
        material: of a run of TC-MGC.

    Returns:
        `names` (G,) of the contrasts, `scores` and `softmax` (G, B): cosines and their softmax at the scale that LSA
        reads; `lsa` (G, B) where the run has LSA; scalars `spread`, the mean deviation of a pair's scores over the
        contrasts, and `regularization`, the weight of SDR in training.
    """
    method = tcmgc_of(material.module)
    assert method is not None
    text, video = material.paired()
    found = method.score(text, video)
    own = torch.arange(len(text), device=found.similarity.device)
    scores = torch.stack([part[own, own] for part in found.parts.values()])
    scale = method.temperature() if method.options.aggregation_on == "logits" else 1.0
    arrays: Arrays = {
        "names": np.array(list(found.parts)),
        "scores": scores.double().cpu().numpy(),
        "softmax": (scores * scale).softmax(0).double().cpu().numpy(),
        "spread": np.array(float(scores.std(0, correction=0).mean())),
        "regularization": np.array(float(method.options.decorrelation.weight)),
    }
    if method.head.lsa is not None:
        arrays["lsa"] = method.head.lsa((scores * scale).unsqueeze(-1))[..., 0].double().cpu().numpy()
    return arrays


def draw_contrasts(arrays: Arrays, key: str) -> list[Chart]:
    """Draw the contrasts' scores and the weights of their aggregation over matching pairs.

    Args:
        arrays: from `measure_contrasts`.
        key: of the card.
    """
    names = [str(name) for name in arrays["names"]]
    panels = [
        ("scores", "contrasts", "cosine"),
        ("softmax", "plain softmax", "weight"),
        ("lsa", "linear softmax (LSA)", "weight"),
    ]
    panels = [panel for panel in panels if panel[0] in arrays]
    figures, axes = new_figure(len(panels))
    for axis, (name, title, quantity) in zip(axes, panels, strict=True):
        boxes(axis, arrays[name], names)
        axis.set_title(title)
        axis.set_ylabel(quantity)
    return [
        to_chart(
            figures,
            f"{key}-contrasts",
            "Balance of the contrasts",
            f"Box plots over matching pairs of the scores of {', '.join(names).replace('_', '-')}, and of their "
            "weights.",
            [
                Fact("mean deviation of a pair's scores over the contrasts", "contrasts.spread"),
                Fact("weight of SDR in training", "contrasts.regularization"),
            ],
            "TC-MGC, Fig. 13, over all matching pairs of the test split.",
        )
    ]


def boxes(axis: Axes, values: np.ndarray, names: Sequence[str]) -> None:
    """Draw box plots (G, B) of contrasts such as `video_word` in the report's colours."""
    drawn = axis.boxplot(list(values), patch_artist=True, showfliers=False)
    for box, colour in zip(drawn["boxes"], COLOURS, strict=False):
        box.set(facecolor=colour, alpha=0.6, edgecolor=colour)
    for part in ("whiskers", "caps", "medians"):
        for line in drawn[part]:
            line.set(color=COLOURS[4], linewidth=1.0)
    axis.set_xticks(range(1, len(names) + 1), [name.replace("_", "-\n") for name in names])


@torch.no_grad()
def measure_attention(material: Material) -> Arrays:
    """Return how sentence and words attend to the frames of their own videos.

    Args:
        material: of a run whose `attends` is true.

    Returns:
        `captions` (K,), `words` (K, 1 + W) as text, the sentence first, empty where padded; `weights` (K, 1 + W, F),
        averaged over heads; `strips` (K, F, S, S, 3) uint8.
    """
    method = tcmgc_of(material.module)
    assert method is not None
    assert method.head.attention is not None
    attention = method.head.attention
    pairs = material.pairs[torch.linspace(0, len(material.pairs) - 1, min(ATTENDED, len(material.pairs))).long()]
    words, weights, strips = [], [], []
    for text_row, video_row in pairs.tolist():
        text = material.texts[[text_row]]
        video = material.videos[[video_row]]
        asked = attention.queries(torch.cat([text.sentence.unsqueeze(1), text.words], dim=1))
        mask = video.frame_mask if method.options.mask_frames else None
        found = attention.frame_weights(DensePairVectors.from_texts(asked, videos=1), video.frames, mask)
        found = found[0, :, 0].unflatten(0, (attention.heads, -1)).mean(0).T  # (1 + W, F)
        pieces = _pieces(material, text_row, text.words.shape[1])
        words.append([*pieces, *[""] * (len(found) - len(pieces))])
        weights.append(found.cpu().numpy())
        strips.append(material.strip(video_row, frames=video.frames.shape[1]))
    return {
        "captions": np.array([material.caption(text) for text, _ in pairs.tolist()]),
        "words": np.array(words),
        "weights": np.stack(weights),
        "strips": np.stack(strips),
    }


def _pieces(material: Material, text: int, words: int) -> list[str]:
    encoder = material.module.encoder
    if isinstance(encoder, OpenClipEncoder):
        return ["sentence", *encoder.tokenizer.pieces(material.caption(text), words)]
    return ["sentence", *[f"word {place}" for place in range(1, words + 1)]]


def draw_attention(arrays: Arrays, key: str) -> list[Chart]:
    """Draw the attention of every word over the frames, below the frames themselves.

    Args:
        arrays: from `measure_attention`.
        key: of the card.
    """
    charts = []
    for place, caption in enumerate(arrays["captions"]):
        words = [_MARKS.get(str(word), str(word)) for word in arrays["words"][place] if word]
        weights = arrays["weights"][place][: len(words)]
        frames = weights.shape[1]
        figures, _ = new_figure(1, height=1.1 + 0.17 * len(words))
        figures[0].clear()
        figures[0].subplots_adjust(left=0.26, right=0.83, hspace=0.03, top=0.97)  # room for words, and for the scale
        strip, axis = figures[0].subplots(2, 1, sharex=True, height_ratios=(1, max(1, 0.5 * len(words))))
        across = (0.5, frames + 0.5)
        strip.imshow(np.concatenate(list(arrays["strips"][place]), axis=1), aspect="auto", extent=(*across, 0, 1))
        strip.set_axis_off()
        shown = axis.imshow(
            weights,
            aspect="auto",
            cmap="viridis",
            vmin=0,
            extent=(*across, len(words) - 0.5, -0.5),
            interpolation="none",
        )
        axis.set_yticks(range(len(words)), words)
        axis.set_xticks(range(1, frames + 1, 1 + (frames - 1) // 12))
        axis.set_xlabel("frame")
        scale = figures[0].colorbar(shown, ax=[strip, axis], fraction=0.06, pad=0.03)
        scale.ax.set_title("weight", loc="left")
        alt = "A row of frames, and below it a heat map of the sentence and the words, one row each, over them."
        drawn = to_chart(figures, f"{key}-attention{place}", "", alt)
        html = f"<h4>“{escape(caption)}”</h4>{drawn.svg}"
        charts.append(
            Chart(
                TITLE,
                alt,
                html=html,
                note="TC-MGC, Fig. 11, which joins words and frames by lines; weights are means over heads.",
            )
        )
    return charts
