"""Figures of any method: scores, retrieval mass and errors (NCL, Figs. 2, 3, and 6), the modalities (Figs. 7 and 8)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.balance import balance, matching_share, retrieval_mass
from tvr_lightning.evaluation.sources import MatrixSource
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.ranks import text_to_video_ranks
from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, frames, histograms, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit, normalized_scores

MOST_MASS = 5
MASS_EXAMPLES = 4
MASS_VIDEOS = ("its own video", "first before normalization", "first after normalization")
DIRECTIONS = {"t2v": "text to video", "v2t": "video to text"}


def measure_similarity(encoded: EncodedSplit) -> Arrays:
    """Return histograms of the scores of `positive` and `negative` pairs (DPDV, Fig. S1; GAID, Fig. 6).

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
    facts = [
        f"mean of matching pairs: {arrays['positive_mean']:.3g}; of other pairs: {arrays['negative_mean']:.3g}",
        f"chance that another pair outscores a matching one: {arrays['overlap']:.3g} %",
    ]
    images = drawings(
        [axis], "Two histograms of scores: of texts with their own videos, and of texts with other videos."
    )
    note = "DPDV, Fig. S1, and GAID, Fig. 6, also show those of a baseline: see the pages of the tables."
    yield Chart("", images, facts, note)


@torch.no_grad()
def measure_balance(encoded: EncodedSplit) -> dict[str, Any]:
    """Return retrieval mass and error rates of both directions, before post-processing.

    For t2v and v2t: `<direction>.mass` (G,) relative to its share, `<direction>.edges`, `.items`, `.false_negative`,
    `.false_positive` (K,) by bins of it, and `<direction>.error`; after normalization by queues or the test set, also
    `normalized.<direction>.mass` and `.error`, otherwise `normalized.missing`, the reason.
    """
    scores = {"": (encoded.similarity.double(), encoded.similarity.double().T)}
    arrays: dict[str, Any] = {}
    if encoded.module.evaluation_config.normalization is not None:
        try:
            scores["normalized."] = normalized_scores(encoded)
        except UserError as error:
            arrays["normalized.missing"] = str(error)
    videos = torch.arange(len(encoded.videos))
    temperature = encoded.module.score_temperature()
    groups = (encoded.matching, videos), (videos, encoded.matching)
    for start, matrices in scores.items():
        for name, matrix, of in zip(DIRECTIONS, matrices, groups, strict=True):
            found = balance(MatrixSource(matrix), temperature, *of)
            arrays |= {f"{start}{name}.mass": found.mass / found.share, f"{start}{name}.error": found.error}
            if not start:
                arrays |= {f"{name}.{field}": rate for field, rate in found.rates.items()}
    return arrays


def draw_balance(arrays: Arrays) -> Iterator[Chart]:
    """Draw the distribution of retrieval mass and the errors by it."""
    axes = new_panels(4)
    bins = np.linspace(0, MOST_MASS, 26)
    facts = []
    for spread, rates, (name, words) in zip(axes[::2], axes[1::2], DIRECTIONS.items(), strict=True):
        for start, color, label in (("", COLORS[3], "scores"), ("normalized.", COLORS[0], "normalized")):
            if f"{start}{name}.mass" in arrays:
                # Items beyond the last bin are counted in it.
                counts = np.histogram(np.minimum(arrays[f"{start}{name}.mass"], MOST_MASS), bins)[0]
                spread.stairs(counts, bins, fill=not start, color=color, alpha=0.7, label=label)
                facts.append(
                    f"{start.replace('.', ' ')}normalization error, {words}: {arrays[f'{start}{name}.error']:.3g}"
                )
        spread.legend()
        spread.axvline(1.0, color=COLORS[2], linewidth=1)
        spread.set(title=f"{words}: spread of the mass", xlabel="mass over share", ylabel="items")
        spread.set_xticks(range(MOST_MASS + 1), [*range(MOST_MASS), f"{MOST_MASS} and\nmore"])
        where = np.flatnonzero(arrays[f"{name}.items"] > 0)
        for field, color in (("false_negative", COLORS[0]), ("false_positive", COLORS[1])):
            values = 100 * arrays[f"{name}.{field}"][where]
            rates.plot(where, values, marker="o", markersize=3, color=color, label=field.replace("_", " "))
        edges = arrays[f"{name}.edges"]
        rates.set_xticks(range(len(edges)), [f"{edge:g}" for edge in edges], rotation=60)
        rates.set(title=f"{words}: errors at rank 1", xlabel="mass over share, from", ylabel="errors, %")
        rates.legend()
    note = "NCL, Eq. 5 and Figs. 2 and 3, with the run's temperature; before post-processing unless stated otherwise."
    if "normalized.missing" in arrays:
        note += f" Normalized scores are not drawn: {arrays['normalized.missing']}."
    alt = "Histograms of the items' retrieval mass relative to their share, and lines of the error rates by that mass."
    yield Chart("", drawings(axes, alt), facts, note)


def measure_modalities(encoded: EncodedSplit) -> dict[str, Any]:
    """Return similarities within and between the modalities, modal means, and a `map` (2, B, 2) by PCA.

    `text_text` and `video_video` are of different items, `text_video` of pairs that do not match.
    """
    text, video = encoded.paired()
    texts = unit(text.sentence).cpu()
    videos = unit(masked_mean(unit(video.frames), video.frame_mask)).cpu()
    others = ~torch.eye(len(texts), dtype=torch.bool)
    arrays: dict[str, Any] = {
        "text_text": (texts @ texts.T)[others].mean(),
        "video_video": (videos @ videos.T)[others].mean(),
        "text_video": (texts @ videos.T)[others].mean(),
        "matching": (texts * videos).sum(-1).mean(),
        "text_mean": texts.mean(0).norm(),
        "video_mean": videos.mean(0).norm(),
        "mean_distance": (texts.mean(0) - videos.mean(0)).norm(),
    }
    points = torch.cat([texts, videos]).numpy()
    points -= points.mean(axis=0)
    axes = np.linalg.svd(points, full_matrices=False)[2][:2]
    return arrays | {"map": (points @ axes.T).reshape(2, len(texts), 2)}


def draw_modalities(arrays: Arrays) -> Iterator[Chart]:
    """Draw mean similarities as bars, and the map with a line between each text and its video."""
    axes = new_panels(2)
    bars = ["text_text", "video_video", "text_video", "matching"]
    axes[0].bar([name.replace("_", "-\n") for name in bars], [float(arrays[name]) for name in bars], color=COLORS[:4])
    axes[0].axhline(0, color=COLORS[4], linewidth=0.6)
    axes[0].set(title="means over pairs", ylabel="cosine")
    texts, videos = arrays["map"]
    axes[1].plot(*np.stack([texts, videos]).transpose(2, 0, 1), color=COLORS[5], linewidth=0.4, alpha=0.5)
    axes[1].scatter(texts[:, 0], texts[:, 1], s=9, color=COLORS[0], label="texts")
    axes[1].scatter(videos[:, 0], videos[:, 1], s=9, color=COLORS[1], marker="s", label="videos")
    axes[1].set(title="principal components; lines join pairs", xticks=[], yticks=[])
    axes[1].legend()
    alt = "Bars of the mean cosines within and between texts and videos, and a two-dimensional map of texts and videos."
    facts = [
        f"distance of the modal means: {arrays['mean_distance']:.3g}",
        f"length of the texts' mean: {arrays['text_mean']:.3g}; of the videos' mean: {arrays['video_mean']:.3g}",
    ]
    note = "NCL, Figs. 7 and 8, after training: sentences and means of the unit frames, before any conditioning."
    yield Chart("", drawings(axes, alt), facts, note)


@torch.no_grad()
def measure_mass(encoded: EncodedSplit) -> dict[str, Any]:
    """Return the Q queries whose own video moves furthest, with the videos of `MASS_VIDEOS`.

    `rank` (2, Q) of the own video before and after, `mass` (2, Q, 3) relative to a video's share, `names` (Q, 3), and
    `strips` (Q, 3, F, S, S, 3).
    """
    scores = encoded.similarity.double(), normalized_scores(encoded)[0]
    rank = torch.stack([text_to_video_ranks(each, encoded.matching).expected() for each in scores])
    queries = torch.argsort((rank[0] - rank[1]).abs(), descending=True, stable=True)[:MASS_EXAMPLES]
    shown = torch.stack([encoded.matching[queries], *(each[queries].argmax(1) for each in scores)], dim=1)
    temperature = encoded.module.score_temperature()
    share = matching_share(encoded.matching, torch.arange(len(encoded.videos)))
    mass = torch.stack([retrieval_mass(MatrixSource(each), temperature) / share for each in scores])
    return {
        "captions": [encoded.caption(query) for query in queries],
        "rank": rank[:, queries],
        "mass": mass[:, shown],
        "names": [[encoded.record(video).video_id for video in row] for row in shown],
        "strips": np.stack([[encoded.strip(video) for video in row] for row in shown.tolist()]),
    }


def draw_mass(arrays: Arrays) -> Iterator[Chart]:
    """Return one chart per query with frames of its videos and their mass."""
    note = (
        "NCL, Fig. 6, with the scores of one run before and after its normalization, for the queries whose rank "
        "changes most. Mass is the sum of a video's retrieval probabilities over all queries, relative to its share."
    )
    for query, caption in enumerate(arrays["captions"]):
        images = []
        for place, label in enumerate(MASS_VIDEOS):
            name, (before, after) = arrays["names"][query, place], arrays["mass"][:, query, place]
            words = f"{label}: {name}, mass {before:.3g}, normalized {after:.3g}"
            own = arrays["names"][query, 0]
            images.append(frames(arrays["strips"][query, place], f"Frames of {name}, {label}", words, name == own))
        facts = ["rank of its own video: {:g}, normalized {:g}".format(*arrays["rank"][:, query])]
        yield Chart(f"Retrieval mass: “{caption}”", images, facts, note if query == 0 else "")
