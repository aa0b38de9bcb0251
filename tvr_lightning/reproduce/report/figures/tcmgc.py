"""Figures of TC-MGC: maps of words and frames (Fig. 10), attention (11), contrasts and the weights of LSA (13)."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes

from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, frames, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit

ATTENDED = 2  # pairs whose attention is shown
MAPPED_PAIRS = 40
_MARKS = {"<start_of_text>": "(start)", "<end_of_text>": "(end)"}


@torch.no_grad()
def measure_contrasts(encoded: EncodedSplit) -> dict[str, Any]:
    """Return the scores (G, B) of G contrasts for matching pairs, and the weights (G, B) of their aggregation."""
    method = encoded.module
    found = method.score(*encoded.paired()).parts
    scores = torch.stack([part.diagonal() for part in found.values()])
    logits = scores * (method.temperature() if method.options.aggregation_on == "logits" else 1.0)
    arrays = {"names": list(found), "scores": scores, "softmax": logits.softmax(0)}
    arrays["regularization"] = float(method.options.decorrelation.weight)
    if method.head.lsa is not None:
        arrays["lsa"] = method.head.lsa(logits.unsqueeze(-1))[..., 0]
    return arrays


def draw_contrasts(arrays: Arrays) -> Iterator[Chart]:
    """Draw the contrasts' scores and the weights of their aggregation over matching pairs."""
    titles = {"scores": "contrasts", "softmax": "plain softmax", "lsa": "linear softmax (LSA)"}
    shown = [name for name in titles if name in arrays]
    axes = new_panels(len(shown))
    for axis, name in zip(axes, shown, strict=True):
        boxes(axis, arrays[name], arrays["names"])
        axis.set(title=titles[name], ylabel="cosine" if name == "scores" else "weight")
    names = ", ".join(arrays["names"]).replace("_", "-")
    images = drawings(axes, f"Box plots over matching pairs of the scores of {names}, or of their weights.")
    facts = [f"weight of SDR in training: {arrays['regularization']:.3g}"]
    yield Chart("", images, facts, "TC-MGC, Fig. 13, over all matching pairs of the test split.")


def boxes(axis: Axes, values: np.ndarray, names: Iterable[str]) -> None:
    """Draw box plots (G, B) of contrasts such as `video_word`."""
    lines: dict[str, Any] = {key: {"color": COLORS[4]} for key in ("whiskerprops", "capprops", "medianprops")}
    drawn = axis.boxplot(list(values), patch_artist=True, showfliers=False, **lines)
    for box, color in zip(drawn["boxes"], COLORS, strict=False):
        box.set(facecolor=color, alpha=0.6, edgecolor=color)
    axis.set_xticks(range(1, len(values) + 1), [name.replace("_", "-\n") for name in names])


@torch.no_grad()
def measure_attention(encoded: EncodedSplit) -> dict[str, Any]:
    """Return the attention (K, 1 + W, F) of sentence and words to the frames of their videos, averaged over heads."""
    method = encoded.module
    encoder = method.encoder
    attention = method.head.attention
    total = len(encoded.pairs)
    spread = torch.linspace(0, total - 1, min(ATTENDED, total)).long()
    pairs = encoded.pairs[spread].tolist()
    words = []
    weights = []
    for text_row, video_row in pairs:
        text, video = encoded.texts[[text_row]], encoded.videos[[video_row]]
        queries = attention.queries(torch.cat([text.sentence.unsqueeze(1), text.words], dim=1))
        mask = video.frame_mask if method.options.mask_frames else None
        found = attention.frame_weights(queries, video.frames, mask)
        weights.append(found[0, :, 0].unflatten(0, (attention.heads, -1)).mean(0).T)  # (1 + W, F)
        count = text.words.shape[1]
        pieces = [f"word {place}" for place in range(1, count + 1)]
        if isinstance(encoder, OpenClipEncoder):
            pieces = encoder.tokenizer.pieces(encoded.caption(text_row), count)
        words.append(["sentence", *pieces, *[""] * (count - len(pieces))])
    return {
        "captions": [encoded.caption(text) for text, _ in pairs],
        "words": words,
        "weights": torch.stack(weights),
        "strips": np.stack([encoded.strip(video, frames=encoded.videos.frames.shape[1]) for _, video in pairs]),
    }


def draw_attention(arrays: Arrays) -> Iterator[Chart]:
    """Draw the attention of every word over the frames."""
    for caption, shown, all_weights, strip in zip(
        arrays["captions"], arrays["words"], arrays["weights"], arrays["strips"], strict=True
    ):
        words = [_MARKS.get(word, word) for word in shown if word]
        weights = all_weights[: len(words)]
        count = weights.shape[1]
        (axis,) = new_panels(1, height=1.1 + 0.17 * len(words), layout="constrained")
        image = axis.imshow(weights, aspect="auto", vmin=0, extent=(0.5, count + 0.5, len(words) - 0.5, -0.5))
        axis.set_yticks(range(len(words)), words)
        axis.set_xticks(range(1, count + 1, 1 + (count - 1) // 12))
        axis.set(xlabel="frame")
        axis.figure.colorbar(image, ax=axis).ax.set_title("weight", loc="left")
        drawn = drawings([axis], "A heat map with one row each for the sentence and the words, over the frames.")
        images = [frames(strip, "The frames of its video"), *drawn]
        note = "TC-MGC, Fig. 11, which connects words and frames with lines; weights are means over heads."
        yield Chart(f"Attention of sentence and words over frames: “{caption}”", images, note=note)


def measure_map(encoded: EncodedSplit) -> Arrays:
    """Return maps `words` and `frames` (K, 2) of the tokens of up to 40 pairs, and the pair (K,) of each token."""
    from sklearn.manifold import TSNE  # takes a second, and only TC-MGC needs it

    text, video = encoded.paired(MAPPED_PAIRS)
    arrays: Arrays = {}
    tokens = {"words": (text.words, text.word_mask), "frames": (video.frames, video.frame_mask)}
    for name, (vectors, mask) in tokens.items():
        kept = mask.bool()
        shown = vectors[kept].float().cpu().numpy()
        arrays[name] = TSNE(perplexity=min(30.0, (len(shown) - 1) / 3), random_state=0).fit_transform(shown)
        arrays[f"{name}_pair"] = torch.nonzero(kept)[:, 0].cpu().numpy()
    return arrays


def draw_map(arrays: Arrays) -> Iterator[Chart]:
    """Draw both maps, with one color for each pair."""
    axes = new_panels(2)
    pairs = 1 + int(arrays["words_pair"].max())
    for axis, name in zip(axes, ("words", "frames"), strict=True):
        horizontal, vertical = arrays[name].T
        axis.scatter(horizontal, vertical, s=5, c=colormaps["hsv"](arrays[f"{name}_pair"] / pairs))
        axis.set(title=name, xticks=[], yticks=[])
    alt = "A map of points, one for each token, with one color for each pair of a text and a video."
    note = f"TC-MGC, Fig. 10: t-SNE of the words and the frames of {pairs} pairs, one color each."
    yield Chart("", drawings(axes, alt), note=note)
