"""Figures of any method: retrieval mass and errors (NCL, Figs. 2 and 3), modalities in the space (Figs. 7 and 8)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.evaluation.balance import Balance, balance
from tvr_lightning.evaluation.evaluator import Evaluator
from tvr_lightning.evaluation.normalization import Direction
from tvr_lightning.evaluation.sources import MatrixSource, TransposedSource
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.contrast import EmptyQueueError
from tvr_lightning.reproduce.report.figures.drawing import (
    COLOURS,
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

LEAST_POINTS = 4
MOST_MASS = 5

_DIRECTIONS = {"t2v": "text to video", "v2t": "video to text"}


def measure_balance(encoded: EncodedSplit) -> Arrays:
    """Return retrieval mass and error rates of both directions, before post-processing.

    Returns:
        For t2v and v2t: `<direction>.mass` (G,) relative to its share, `<direction>.edges`, `.items`,
        `.false_negative`, `.false_positive` (K,) by bins of it, and the scalar `<direction>.error`; where the run
        normalises scores by its queues or the test set, `normalized.<direction>.mass` and `.error` too, and where it
        does so by anything else `normalized.missing`, why they are not measured.
    """
    source = MatrixSource(encoded.similarity.double())
    videos = torch.arange(source.gallery)
    temperature = encoded.module.score_temperature()
    arrays: Arrays = {}
    for name, scores, queries, gallery in (
        ("t2v", source, encoded.matching, videos),
        ("v2t", TransposedSource(source), videos, encoded.matching),
    ):
        found: Balance = balance(scores, temperature, queries, gallery)
        arrays[f"{name}.mass"] = (found.mass / found.share).numpy()
        arrays[f"{name}.error"] = np.array(found.error)
        for field in ("edges", "items", "false_negative", "false_positive"):
            arrays[f"{name}.{field}"] = getattr(found.rates, field).numpy()
    return arrays | _normalized(encoded)


@torch.no_grad()
def _normalized(encoded: EncodedSplit) -> Arrays:
    """Mass and error behind the run's score normalisation; nothing without one."""
    module = encoded.module
    normalizer = module.evaluation_config.normalization
    if normalizer is None:
        return {}
    bank = None
    if normalizer.needs_bank:
        try:
            bank = module.contrast.bank()
        except EmptyQueueError:
            return {"normalized.missing": np.array("the queues of training queries are empty")}
        if bank is None:
            reason = "it needs a bank of the training split, which is not encoded for figures"
            return {"normalized.missing": np.array(reason)}
    evaluator = Evaluator(module.score, temperature=module.score_temperature(), measure_balance=True)
    index = (encoded.text_index, encoded.video_index)
    evaluation = evaluator.evaluate(encoded.texts, index[0], encoded.videos, index[1], encoded.truth, normalizer, bank)
    arrays: Arrays = {}
    directions: tuple[tuple[str, Direction], ...] = (("t2v", "text-to-video"), ("v2t", "video-to-text"))
    for name, direction in directions:
        found = evaluation.balance[direction]
        arrays[f"normalized.{name}.mass"] = (found.mass / found.share).cpu().numpy()
        arrays[f"normalized.{name}.error"] = np.array(found.error)
    return arrays


def draw_balance(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw how retrieval mass is spread and what errors it goes with."""
    figures, axes = new_figure(4)
    for place, (name, words) in enumerate(_DIRECTIONS.items()):
        spread, rates = axes[2 * place], axes[2 * place + 1]
        bins = np.linspace(0, MOST_MASS, 26)
        spread.stairs(_counted(arrays[f"{name}.mass"], bins), bins, fill=True, color=COLOURS[3], alpha=0.7)
        if f"normalized.{name}.mass" in arrays:
            after = _counted(arrays[f"normalized.{name}.mass"], bins)
            spread.stairs(after, bins, color=COLOURS[0], label="normalised")
            spread.legend()
        spread.axvline(1.0, color=COLOURS[2], linewidth=1)
        spread.set_title(f"{words}: spread of the mass")
        ticks = range(MOST_MASS + 1)
        spread.set_xticks(ticks, [*map(str, ticks[:-1]), f"{MOST_MASS} and\nmore"])
        spread.set_xlabel("mass over share")
        spread.set_ylabel("items")
        filled = arrays[f"{name}.items"] > 0
        where = np.arange(len(filled))[filled]
        for field, colour in (("false_negative", POSITIVE), ("false_positive", NEGATIVE)):
            label = field.replace("_", " ")
            rates.plot(
                where, 100 * arrays[f"{name}.{field}"][filled], marker="o", markersize=3, color=colour, label=label
            )
        rates.set_xticks(range(len(filled)), [f"{edge:g}" for edge in arrays[f"{name}.edges"]], rotation=60)
        rates.set_title(f"{words}: errors at rank 1")
        rates.set_xlabel("mass over share, from")
        rates.set_ylabel("errors, %")
        rates.legend()
    scalars = [Scalar(f"normalization error, {words}", f"balance.{name}.error") for name, words in _DIRECTIONS.items()]
    if "normalized.t2v.error" in arrays:
        for name, words in _DIRECTIONS.items():
            scalars.append(Scalar(f"normalized, {words}", f"balance.normalized.{name}.error"))
    lacking = (
        f" Normalized scores are not drawn: {arrays['normalized.missing']}." if "normalized.missing" in arrays else ""
    )
    yield to_chart(
        figures,
        f"{key}-balance",
        "For both directions a histogram of the items' retrieval mass relative to their share, and lines of the "
        "false negative and false positive rates by that mass.",
        scalars,
        "NCL, Eq. 5 and Figs. 2 and 3, with the run's temperature; before post-processing unless stated otherwise."
        + lacking,
    )


def _counted(mass: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Items by mass; those beyond the last bin are in it, as its tick says."""
    return np.histogram(np.minimum(mass, bins[-1]), bins)[0]


def sentence_and_video(encoded: EncodedSplit) -> tuple[Tensor, Tensor]:
    """Return unit vectors (B, D) of the texts and of the mean frames of the matching pairs."""
    text, video = encoded.paired()
    return unit(text.sentence).cpu(), unit(masked_mean(unit(video.frames), video.frame_mask)).cpu()


@torch.no_grad()
def measure_modalities(encoded: EncodedSplit) -> Arrays:
    """Mean similarities within and between the two modalities, modal means, and a map by principal components.

    Returns:
        Scalars `text_text`, `video_video` (different items), `text_video` (pairs that do not match), `matching`,
        `mean_distance` between the modal means and their lengths `text_mean`, `video_mean`; and, where there are
        enough items, `map` (2, B, 2): texts and videos in the plane.
    """
    text, video = sentence_and_video(encoded)
    count = len(text)
    others = ~torch.eye(count, dtype=torch.bool)

    def mean(a: Tensor, b: Tensor) -> float:
        return float((a @ b.T)[others].mean()) if count > 1 else float("nan")

    values = {
        "text_text": mean(text, text),
        "video_video": mean(video, video),
        "text_video": mean(text, video),
        "matching": float((text * video).sum(-1).mean()),
        "text_mean": float(text.mean(0).norm()),
        "video_mean": float(video.mean(0).norm()),
        "mean_distance": float((text.mean(0) - video.mean(0)).norm()),
    }
    arrays = {name: np.array(value) for name, value in values.items()}
    if count >= LEAST_POINTS:
        points = torch.cat([text, video]).numpy()
        points -= points.mean(axis=0)
        axes = np.linalg.svd(points, full_matrices=False)[2][:2]
        arrays["map"] = (points @ axes.T).reshape(2, count, 2)
    return arrays


def draw_modalities(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw mean similarities as bars, and the map with a line between each text and its video."""
    bars = {"text_text": "text-text", "video_video": "video-video", "text_video": "text-video", "matching": "matching"}
    figures, axes = new_figure(2 if "map" in arrays else 1)
    heights = [float(arrays[name]) for name in bars]
    axes[0].bar(range(len(bars)), heights, color=COLOURS[: len(bars)])
    axes[0].set_xticks(range(len(bars)), [name.replace("-", "\n") for name in bars.values()])
    axes[0].axhline(0, color=COLOURS[4], linewidth=0.6)
    axes[0].set_title("means over pairs")
    axes[0].set_ylabel("cosine")
    if "map" in arrays:
        texts, videos = arrays["map"]
        # One path for all lines; what is not finite parts them.
        joined = np.stack([texts, videos, np.full_like(texts, np.nan)], axis=1).reshape(-1, 2)
        axes[1].plot(joined[:, 0], joined[:, 1], color=COLOURS[5], linewidth=0.4, alpha=0.5)
        axes[1].scatter(texts[:, 0], texts[:, 1], s=9, color=POSITIVE, label="texts")
        axes[1].scatter(videos[:, 0], videos[:, 1], s=9, color=NEGATIVE, marker="s", label="videos")
        axes[1].set_title("principal components, lines join matching pairs")
        axes[1].set_xticks([])
        axes[1].set_yticks([])
        axes[1].legend()
    yield to_chart(
        figures,
        f"{key}-modalities",
        "Bars of the mean cosines within and between texts and videos, and a two-dimensional map of texts and videos.",
        [
            Scalar("distance of the modal means", "modalities.mean_distance"),
            Scalar("length of the texts' mean", "modalities.text_mean"),
            Scalar("length of the videos' mean", "modalities.video_mean"),
        ],
        "NCL, Figs. 7 and 8, after training: sentences and means of the unit frames, before any conditioning on "
        "each other." + ("" if "map" in arrays else f" The map is not drawn: it needs {LEAST_POINTS} matching pairs."),
    )


FIGURES = (
    FigureKind("balance", "Retrieval mass and errors", measure_balance, draw_balance),
    FigureKind("modalities", "The two modalities", measure_modalities, draw_modalities),
)
