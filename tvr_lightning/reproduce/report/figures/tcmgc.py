"""Figures of TC-MGC: attention over frames (Fig. 11), the contrasts and weights of LSA (13)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes

from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.methods import TCMGC
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.pairwise import DensePairVectors
from tvr_lightning.reproduce.report.figures.drawing import COLOURS, Arrays, Chart, Scalar, new_figure, to_chart
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit
from tvr_lightning.reproduce.report.figures.kind import FigureKind
from tvr_lightning.reproduce.report.render import render

_MARKS = {"<start_of_text>": "(start)", "<end_of_text>": "(end)"}
ATTENDED = 2
"""Pairs whose attention is shown."""


def tcmgc_of(module: RetrievalModule) -> TCMGC | None:
    """Return the TC-MGC that a method is; None where it is none."""
    return module if isinstance(module, TCMGC) else None


def attending(module: RetrievalModule) -> TCMGC | None:
    """Return the TC-MGC that conditions videos on texts; None where there is none."""
    method = tcmgc_of(module)
    return method if method is not None and method.head.attention is not None else None


@torch.no_grad()
def measure_contrasts(encoded: EncodedSplit) -> Arrays:
    """Return the contrasts' scores of matching pairs, and the weights of their aggregation.

    Returns:
        `names` (G,) of the contrasts, `scores` and `softmax` (G, B): cosines and their softmax at the scale that LSA
        reads; `lsa` (G, B) where the run has LSA; scalars `spread`, the mean deviation of a pair's scores over the
        contrasts, and `regularization`, the weight of SDR in training.
    """
    method = tcmgc_of(encoded.module)
    assert method is not None
    text, video = encoded.paired()
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


def draw_contrasts(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw the contrasts' scores and the weights of their aggregation over matching pairs."""
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
    yield to_chart(
        figures,
        f"{key}-contrasts",
        f"Box plots over matching pairs of the scores of {', '.join(names).replace('_', '-')}, and of their weights.",
        [
            Scalar("mean deviation of a pair's scores over the contrasts", "contrasts.spread"),
            Scalar("weight of SDR in training", "contrasts.regularization"),
        ],
        "TC-MGC, Fig. 13, over all matching pairs of the test split.",
    )


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
def measure_attention(encoded: EncodedSplit) -> Arrays:
    """Return how sentence and words attend to the frames of their own videos.

    Returns:
        `captions` (K,), `words` (K, 1 + W) as text, the sentence first, empty where padded; `weights` (K, 1 + W, F),
        averaged over heads; `strips` (K, F, S, S, 3) uint8.
    """
    method = tcmgc_of(encoded.module)
    assert method is not None
    assert method.head.attention is not None
    attention = method.head.attention
    pairs = encoded.pairs[torch.linspace(0, len(encoded.pairs) - 1, min(ATTENDED, len(encoded.pairs))).long()]
    words, weights, strips = [], [], []
    for text_row, video_row in pairs.tolist():
        text = encoded.texts[[text_row]]
        video = encoded.videos[[video_row]]
        asked = attention.queries(torch.cat([text.sentence.unsqueeze(1), text.words], dim=1))
        mask = video.frame_mask if method.options.mask_frames else None
        found = attention.frame_weights(DensePairVectors.from_texts(asked, videos=1), video.frames, mask)
        found = found[0, :, 0].unflatten(0, (attention.heads, -1)).mean(0).T  # (1 + W, F)
        pieces = _pieces(encoded, text_row, text.words.shape[1])
        words.append([*pieces, *[""] * (len(found) - len(pieces))])
        weights.append(found.cpu().numpy())
        strips.append(encoded.strip(video_row, frames=video.frames.shape[1]))
    return {
        "captions": np.array([encoded.caption(text) for text, _ in pairs.tolist()]),
        "words": np.array(words),
        "weights": np.stack(weights),
        "strips": np.stack(strips),
    }


def _pieces(encoded: EncodedSplit, text: int, words: int) -> list[str]:
    encoder = encoded.module.encoder
    if isinstance(encoder, OpenClipEncoder):
        return ["sentence", *encoder.tokenizer.pieces(encoded.caption(text), words)]
    return ["sentence", *[f"word {place}" for place in range(1, words + 1)]]


def draw_attention(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw the attention of every word over the frames, below the frames themselves."""
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
        alt = "A row of frames above a heat map with one row each for the sentence and the words, over the frames."
        drawn = to_chart(figures, f"{key}-attention{place}", alt)
        html = render("captioned.html", caption=caption, frames=None, chart=drawn)
        yield Chart(
            alt,
            html=html,
            note="TC-MGC, Fig. 11, which connects words and frames with lines; weights are means over heads.",
        )


FIGURES = (
    FigureKind("contrasts", "Balance of the contrasts", measure_contrasts, draw_contrasts, tcmgc_of),
    FigureKind(
        "attention", "Attention of sentence and words over frames", measure_attention, draw_attention, attending
    ),
)
