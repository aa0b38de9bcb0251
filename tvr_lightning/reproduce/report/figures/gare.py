"""Figures of GARE: geometry of the increments (Figs. 3 and 8), gradients (2, 4, 7), hard negatives (6)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods import GARE
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.pairwise import DensePairVectors
from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, histograms, in_style, new_panels
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit
from tvr_lightning.reproduce.report.sources import ReportedRun, read_curves

MOST_GRADIENTS = 64
HARDEST = 10
GEOMETRY = {  # panels and their quantities: before the correction and after
    "angle of increment and gap, rad": ("angle_to_gap",),
    "angle of increment and text, rad": ("angle_to_text",),
    "length of the increment": ("increment_norm",),
    "length of the text": ("text_norm", "corrected_norm"),
    "distance of text and video": ("text_to_video", "corrected_to_video"),
}
GRADIENTS = {
    "anchors, no increments": {"plain_positive": "matching pairs", "plain_negative": "other pairs"},
    "anchors, no increments: sum": {"plain_anchor": "all pairs"},
    "increments and corrected texts": {"positive": "matching pairs", "negative": "other pairs"},
    "anchors with increments: sum": {"anchor": "increments constant", "total": "including psi"},
}


def applies(module: RetrievalModule) -> bool:
    """Return whether a method is GARE with increments of texts."""
    return isinstance(module, GARE) and module.head.psi is not None and module.options.increment.corrected == "text"


def measure_geometry(encoded: EncodedSplit) -> Arrays:
    """Return histograms of each quantity in GEOMETRY over `matching` and `other` pairs, with bins by panel."""
    own = torch.eye(len(encoded.pairs), dtype=torch.bool)
    found = encoded.module.head.geometry(*encoded.paired())
    quantities = {name: quantity.detach().double().cpu() for name, quantity in found.items()}
    arrays: Arrays = {}
    for names in GEOMETRY.values():
        values = {f"{name}.matching": quantities[name][own].numpy() for name in names}
        panel = histograms(values | {f"{name}.other": quantities[name][~own].numpy() for name in names})
        arrays |= panel | {f"{names[0]}.edges": panel["edges"]}
    return arrays


def draw_geometry(arrays: Arrays) -> Iterator[Chart]:
    """Draw the histograms of the geometry."""

    def plot(axis: Axes, panel: str, name: str, **style: Any) -> None:
        axis.stairs(arrays[name], arrays[f"{panel}.edges"], **style)

    alt = "Histograms over pairs of angles, lengths, and distances, before and after the correction of the texts."
    note = "GARE, Figs. 3 and 8, after training, on the test split; values before the correction are dashed."
    yield Chart("", drawings(_geometry_panels(plot, None, "share of the pairs"), alt), note=note)


@in_style()
def draw_course(run: ReportedRun) -> Chart | None:
    """Draw the geometry that was logged in training (GARE, Fig. 8); None if the run did not log it."""
    title = "Geometry of the increments during training"
    curves = read_curves(run)
    gaps = [curve for name, curve in curves.items() if name.startswith("train/angle_to_gap")]
    if not gaps:
        return None
    if max(map(len, gaps)) < 2:
        return Chart(title, note="A curve needs two logged steps or more. Lower --trainer.log_every_n_steps.")

    def plot(axis: Axes, panel: str, name: str, **style: Any) -> None:
        if (curve := curves.get(f"train/{name.replace('.', '-')}")) is not None:
            axis.plot(curve.index, curve, **style)
            axis.locator_params("x", integer=True)

    alt = "Lines over training of the increments' angles and lengths, and of the distances of texts and videos."
    note = "means over pairs of a training batch, without dropout; values before the correction are dashed."
    images = drawings(_geometry_panels(plot, "optimizer step", None), alt)
    return Chart(title, images, note=f"GARE, Fig. 8: {note}")


def _geometry_panels(plot: Callable[..., None], xlabel: str | None, ylabel: str | None) -> list[Axes]:
    """Plot quantities such as `text_norm.matching` into the panels of GEOMETRY, whose title labels the other axis."""
    axes = new_panels(len(GEOMETRY))
    for axis, (title, names) in zip(axes, GEOMETRY.items(), strict=True):
        for name in names:
            before = len(names) > 1 and name == names[0]
            for pairs, color in (("matching", COLORS[0]), ("other", COLORS[1])):
                style = {"ls": "--", "label": f"{pairs}, before"} if before else {"ls": "-", "label": pairs}
                plot(axis, names[0], f"{name}.{pairs}", color=color, **style)
        axis.set(xlabel=xlabel or title, ylabel=ylabel or title)
        axis.legend()
    return axes


@torch.enable_grad()
def measure_gradients(encoded: EncodedSplit) -> Arrays:
    """Return the gradients of text-to-video InfoNCE by dimension, with the pooled videos held constant.

    `positive` is that of the corrected text of the matching pair, `negative` the sum over the other pairs, `anchor`
    their sum, and `total` that of t_i through psi too; `plain_*` are without increments. Each has `.mean` and
    `.deviation` (D,) over texts, and `.size`, the mean length.
    """
    method = encoded.module
    text, video = encoded.paired(MOST_GRADIENTS)
    scale = method.temperature().detach()
    text.sentence = text.sentence.detach().clone().requires_grad_(True)
    texts, means, pooled = _pairs(method, text, video)
    delta = method.head.increments(texts, means, text, video).materialize().squeeze(2)  # (N, M, D)
    arrays: Arrays = {}
    for start, change in (("", delta), ("plain_", torch.zeros_like(delta))):
        corrected = text.sentence.unsqueeze(1) + change
        loss = _loss(corrected, pooled, scale)
        gradient, total = torch.autograd.grad(loss, (corrected, text.sentence))
        anchor, own = gradient.sum(1), gradient.diagonal().T
        found = {"anchor": anchor, "positive": own, "negative": anchor - own, "total": total}
        for name, value in found.items():
            array = value.double().cpu().numpy()
            arrays[f"{start}{name}.mean"] = array.mean(0)
            arrays[f"{start}{name}.deviation"] = array.std(0)
            arrays[f"{start}{name}.size"] = np.linalg.norm(array, axis=1).mean()
    return arrays


def _pairs(method: GARE, text: TextFeatures, video: VideoFeatures) -> tuple[DensePairVectors, DensePairVectors, Tensor]:
    """Return sentences, mean frames, and (N, M, D) pooled videos of all pairs; the last without gradient."""
    sentences = DensePairVectors.from_texts(text.sentence.unsqueeze(1), videos=len(video))
    means = DensePairVectors.from_videos(method.head.mean_frames(video).unsqueeze(1), texts=len(text))
    return sentences, means, method.head.pooled(sentences, means, video).materialize().squeeze(2).detach()


def _loss(corrected: Tensor, pooled: Tensor, scale: Tensor) -> Tensor:
    """Return text-to-video InfoNCE, summed over texts, of corrected texts (B, B, D) and pooled videos (B, B, D)."""
    logits = scale * F.cosine_similarity(corrected, pooled, dim=-1)
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="sum")


def draw_gradients(arrays: Arrays) -> Iterator[Chart]:
    """Draw mean and deviation of the gradients over the dimensions, with and without increments."""
    axes = new_panels(len(GRADIENTS))
    for axis, (title, names) in zip(axes, GRADIENTS.items(), strict=True):
        for (name, words), color in zip(names.items(), COLORS, strict=False):
            mean, deviation = arrays[f"{name}.mean"], arrays[f"{name}.deviation"]
            _band(axis, mean, deviation, start=0, color=color, linewidth=0.8, label=words)
        axis.set(title=title, xlabel="dimension", ylabel="gradient")
        axis.ticklabel_format(axis="y", scilimits=(-2, 3))
        axis.legend()
    sizes = {"without increments": "plain_anchor", "with constant ones": "anchor", "through psi": "total"}
    lengths = "; ".join(f"{words}: {arrays[f'{name}.size']:.3g}" for words, name in sizes.items())
    note = "GARE, Figs. 2, 4 and 7, after training: text-to-video InfoNCE with the run's temperature, constant videos."
    images = drawings(axes, "Mean and deviation over texts of the gradient in every dimension.")
    yield Chart("", images, [f"mean length of the anchors' gradient {lengths}"], note)


def _band(axis: Axes, mean: np.ndarray, deviation: np.ndarray, start: int, color: str, **line: Any) -> None:
    """Draw a line with a band of the deviation."""
    places = np.arange(start, start + len(mean))
    axis.fill_between(places, mean - deviation, mean + deviation, color=color, alpha=0.25, linewidth=0)
    axis.plot(places, mean, color=color, **line)


@torch.no_grad()
def measure_hard_negatives(encoded: EncodedSplit) -> dict[str, Any]:
    """Return the gaps `plain` without increments and `corrected` with them, (B, K) for the K hardest other videos.

    The hardest videos are those with the highest scores without increments.
    """
    head = encoded.module.head
    text, video = encoded.paired()
    sentences, means = head.of_texts(text.sentence, len(video)), head.of_videos(head.mean_frames(video), len(text))
    plain = sentences.cosine(head.pooled(sentences, means, video))[..., 0].T
    scores = {"plain": plain, "corrected": encoded.module.score(text, video).similarity}
    others = plain.masked_fill(torch.eye(len(plain), dtype=torch.bool, device=plain.device), -torch.inf)
    hardest = others.topk(min(HARDEST, len(plain) - 1)).indices
    return {name: (each.diagonal()[:, None] - each.gather(1, hardest)).double() for name, each in scores.items()}


def draw_hard_negatives(arrays: Arrays) -> Iterator[Chart]:
    """Draw mean and deviation of the gaps over texts, from the hardest video on."""
    (axis,) = new_panels(1)
    facts = []
    for name, words, color in (("plain", "without", COLORS[1]), ("corrected", "with", COLORS[0])):
        mean = arrays[name].mean(0)
        label = f"{words} increments"
        _band(axis, mean, arrays[name].std(0), start=1, marker="o", markersize=3, color=color, label=label)
        facts.append(f"mean gap to the hardest video {label}: {mean[0]:.3g}")
    axis.axhline(0, color=COLORS[4], linewidth=0.6)
    axis.set(xlabel="other video, from the hardest", ylabel="cosine of own minus other")
    axis.legend()
    alt = "Lines of the mean gap in cosine to the hardest other videos, without increments and with them."
    note = "Both lines are from the same weights; the paper compares with a separately trained baseline: "
    yield Chart("", drawings([axis], alt), facts, f"GARE, Fig. 6. {note}see the pages of the tables.")
