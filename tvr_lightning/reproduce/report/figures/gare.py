"""Figures of GARE: geometry of the increments (Figs. 3 and 8), gradients by dimension (2, 4, 7), step error (9)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.methods import GARE
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.gare.model import trust_region_step
from tvr_lightning.pairwise import DensePairVectors
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

BINS = 40
MOST_GRADIENTS = 64
STEPS = 12
_GEOMETRY = (
    ("angle of increment and gap, rad", ("angle_to_gap",)),
    ("angle of increment and text, rad", ("angle_to_text",)),
    ("length of the increment", ("increment_norm",)),
    ("length of the text", ("text_norm", "corrected_norm")),
    ("distance of text and video", ("text_to_video", "corrected_to_video")),
)
"""Panels, and what each sets over one axis: before the correction and after."""


def gare_of(module: RetrievalModule) -> GARE | None:
    """Return the GARE with increments of texts that a method is; None where it is none."""
    if isinstance(module, GARE) and module.head.psi is not None and module.options.increment.corrected == "text":
        return module
    return None


@torch.no_grad()
def measure_geometry(encoded: EncodedSplit) -> Arrays:
    """Return histograms of what Figs. 3 and 8 show, over matching pairs and over all others.

    Returns:
        For each quantity its `<name>.edges` (BINS + 1,), which those of one panel share, `<name>.positive` and
        `<name>.negative` (BINS,) shares, and the scalars `<name>.positive_mean` and `<name>.negative_mean`.
    """
    method = gare_of(encoded.module)
    assert method is not None
    text, video = encoded.paired()
    own = torch.eye(len(text), dtype=torch.bool)
    arrays: Arrays = {}
    found = {name: values.double().cpu() for name, values in method.head.geometry(text, video).items()}
    for _, names in _GEOMETRY:
        together = torch.stack([found[name] for name in names])
        edges = np.linspace(float(together.min()), float(together.max()) + 1e-6, BINS + 1)
        for name in names:
            arrays[f"{name}.edges"] = edges
            for kind, chosen in (("positive", found[name][own]), ("negative", found[name][~own])):
                arrays[f"{name}.{kind}"] = np.histogram(chosen.numpy(), edges)[0] / max(len(chosen), 1)
                arrays[f"{name}.{kind}_mean"] = np.array(float(chosen.mean()) if len(chosen) else np.nan)
    return arrays


def draw_geometry(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw the histograms of the geometry."""
    figures, axes = new_figure(len(_GEOMETRY))
    for axis, (words, names) in zip(axes, _GEOMETRY, strict=True):
        for name in names:
            before = len(names) > 1 and name == names[0]
            for kind, colour in (("positive", POSITIVE), ("negative", NEGATIVE)):
                label = ("matching" if kind == "positive" else "other") + (", before" if before else "")
                share, edges = arrays[f"{name}.{kind}"], arrays[f"{name}.edges"]
                axis.stairs(share, edges, color=colour, linestyle="--" if before else "-", label=label)
        axis.set_xlabel(words)
        axis.set_ylabel("share of the pairs")
        axis.legend()
    scalars = [
        Scalar("mean angle of increment and gap, matching pairs, rad", "geometry.angle_to_gap.positive_mean"),
        Scalar("other pairs, rad", "geometry.angle_to_gap.negative_mean"),
        Scalar("mean length of the text", "geometry.text_norm.positive_mean"),
        Scalar("of the corrected text, matching pairs", "geometry.corrected_norm.positive_mean"),
    ]
    yield to_chart(
        figures,
        f"{key}-geometry",
        "Histograms over matching and other pairs of the increments' angles and lengths, and of the distances of "
        "texts and videos before and after the correction.",
        scalars,
        "GARE, Figs. 3 and 8, after training, on the test split; values before the correction are dashed. The changes "
        "during training that Fig. 8 shows are not recorded.",
    )


def measure_gradients(encoded: EncodedSplit) -> Arrays:
    """Return the gradients of text-to-video InfoNCE on the anchors and on their corrected texts, by dimension.

    The pooled videos are held constant. `anchor` is what reaches t_i through the corrected texts of all its pairs with
    the increments held constant, `total` through psi too, `positive` and `negative` what acts on the increment and the
    corrected text of the matching pair and, added up, of the others; `plain_*` are the same without increments.

    Returns:
        For each of them `<name>.mean` and `<name>.deviation` (D,) over texts, and the scalar `<name>.size`, the mean
        length of the gradient.
    """
    method = gare_of(encoded.module)
    assert method is not None
    text, video = _batch(encoded)
    scale = method.temperature().detach()
    head = method.head
    sentence = text.sentence.detach().clone().requires_grad_(True)
    text.sentence = sentence
    texts, means = _pairs(method, text, video)
    delta = head.increments(texts, means, text, video).materialize().squeeze(2)  # (N, M, D)
    pooled = head.pooled(texts, means, video).materialize().squeeze(2).detach()
    arrays: Arrays = {}
    for start, change in (("", delta), ("plain_", torch.zeros_like(delta))):
        corrected = (sentence.unsqueeze(1) + change).detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(_loss(corrected, pooled, scale), corrected)  # (B, B, D)
        own = gradient.diagonal().T
        found = {"anchor": gradient.sum(1), "positive": own, "negative": gradient.sum(1) - own}
        if not start:
            (found["total"],) = torch.autograd.grad(_loss(sentence.unsqueeze(1) + delta, pooled, scale), sentence)
        for name, value in found.items():
            array = value.detach().double().cpu().numpy()
            arrays[f"{start}{name}.mean"] = array.mean(0)
            arrays[f"{start}{name}.deviation"] = array.std(0)
            arrays[f"{start}{name}.size"] = np.array(np.linalg.norm(array, axis=1).mean())
    return arrays


def _batch(encoded: EncodedSplit) -> tuple[TextFeatures, VideoFeatures]:
    text, video = encoded.paired()
    return text[:MOST_GRADIENTS], video[:MOST_GRADIENTS]


def _pairs(method: GARE, text: TextFeatures, video: VideoFeatures) -> tuple[DensePairVectors, DensePairVectors]:
    """Sentences and mean frames of all N x M pairs."""
    sentences = DensePairVectors.from_texts(text.sentence.unsqueeze(1), videos=len(video))
    means = method.head.mean_frames(video).unsqueeze(1)
    return sentences, DensePairVectors.from_videos(means, texts=len(text))


def _loss(corrected: Tensor, pooled: Tensor, scale: Tensor) -> Tensor:
    """Text-to-video InfoNCE, summed over texts, of corrected texts (B, B, D) against pooled videos (B, B, D)."""
    logits = scale * F.cosine_similarity(corrected, pooled, dim=-1)
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="sum")


def draw_gradients(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw mean and deviation of the gradients over the dimensions, with and without increments."""
    panels = (
        ("anchors, no increments", ("plain_positive", "plain_negative")),
        ("anchors, no increments: sum", ("plain_anchor",)),
        ("increments and corrected texts", ("positive", "negative")),
        ("anchors with increments: sum", ("anchor", "total")),
    )
    words = {
        "plain_positive": "matching pairs",
        "plain_negative": "other pairs",
        "plain_anchor": "all pairs",
        "positive": "matching pairs",
        "negative": "other pairs",
        "anchor": "increments constant",
        "total": "including psi",
    }
    figures, axes = new_figure(len(panels))
    for axis, (title, names) in zip(axes, panels, strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            mean, deviation = arrays[f"{name}.mean"], arrays[f"{name}.deviation"]
            dimensions = np.arange(len(mean))
            axis.fill_between(dimensions, mean - deviation, mean + deviation, color=colour, alpha=0.25, linewidth=0)
            axis.plot(dimensions, mean, color=colour, linewidth=0.8, label=words[name])
        axis.set_title(title)
        axis.set_xlabel("dimension")
        axis.set_ylabel("gradient")
        axis.ticklabel_format(axis="y", scilimits=(-2, 3))
        axis.legend()
    scalars = [
        Scalar("mean length of the anchors' gradient without increments", "gradients.plain_anchor.size"),
        Scalar("with increments held constant", "gradients.anchor.size"),
        Scalar("with increments, through psi", "gradients.total.size"),
    ]
    yield to_chart(
        figures,
        f"{key}-gradients",
        "Four panels of mean and deviation over texts of the gradient in every dimension: without and with "
        "increments, from matching and from other pairs.",
        scalars,
        "GARE, Figs. 2, 4 and 7: text-to-video InfoNCE with the run's temperature, pooled videos held constant, "
        "after training.",
    )


def measure_steps(encoded: EncodedSplit) -> Arrays:
    """Return how far AdamW's steps of the increments are from the analytic step, |eta - alpha| (Eq. 43).

    A copy of psi goes on for a few steps on one batch of matching pairs at the recipe's rate. eta is the length of an
    increment's change in a step; alpha comes from Eq. 41 with the longest increment of the text as radius.

    Returns:
        `positive` and `negative` (STEPS,), means over matching and other pairs; NaN where there are none. Pairs whose
        gradient has vanished in floating point have no analytic step and are left out.
    """
    method = gare_of(encoded.module)
    assert method is not None
    text, video = _batch(encoded)
    rows = torch.arange(len(text), device=text.sentence.device)
    pairs = PairedFeatures(text.detach(), video.detach(), rows, rows)
    trained = copy.deepcopy(method.head)
    original, method.head = method.head, trained
    optimizer = torch.optim.AdamW(trained.parameters(), lr=method.optimizer_config.lr)
    own = torch.eye(len(text), dtype=torch.bool, device=rows.device)
    found: dict[str, list[float]] = {"positive": [], "negative": []}
    try:
        before = _increments(method, pairs)
        for _ in range(STEPS):
            gradient = _increment_gradient(method, pairs, before)
            radius = before.norm(dim=-1).amax(1, keepdim=True).clamp(min=1e-12)
            pulled = (gradient / gradient.norm(dim=-1, keepdim=True)).isfinite().all(-1)
            # In units of each text's radius, so that one radius serves all.
            _, alpha = trust_region_step((before / radius.unsqueeze(-1))[pulled], gradient[pulled], 1.0)
            optimizer.zero_grad()
            torch.stack([term.reshape(()) for term in method.losses(pairs).values()]).sum().backward()
            optimizer.step()
            after = _increments(method, pairs)
            error = ((after - before).norm(dim=-1)[pulled] - alpha * radius.expand_as(pulled)[pulled]).abs()
            found["positive"].append(float(error[own[pulled]].mean()))
            found["negative"].append(float(error[~own[pulled]].mean()))
            before = after
    finally:
        method.head = original
    return {name: np.array(values) for name, values in found.items()}


@torch.no_grad()
def _increments(method: GARE, pairs: PairedFeatures) -> Tensor:
    return method.head(pairs.text, pairs.video, True).parts["increment"]


def _increment_gradient(method: GARE, pairs: PairedFeatures, increment: Tensor) -> Tensor:
    head, text, video = method.head, pairs.text, pairs.video
    with torch.no_grad():
        texts, means = _pairs(method, text, video)
        pooled = head.pooled(texts, means, video).materialize().squeeze(2)
    leaf = increment.clone().requires_grad_(True)
    loss = _loss(text.sentence.unsqueeze(1) + leaf, pooled, method.temperature().detach())
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def draw_steps(arrays: Arrays, key: str) -> Iterator[Chart]:
    """Draw the step error over the steps."""
    figures, axes = new_figure(2)
    for axis, (kind, colour) in zip(axes, (("positive", POSITIVE), ("negative", NEGATIVE)), strict=True):
        axis.plot(np.arange(1, len(arrays[kind]) + 1), arrays[kind], marker="o", markersize=3, color=colour)
        axis.set_title("matching pairs" if kind == "positive" else "other pairs")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("step")
        axis.set_ylabel("|eta - alpha|")
    yield to_chart(
        figures,
        f"{key}-steps",
        "Two line charts of the mean error of AdamW's step against the analytic step, of matching and other pairs.",
        note="GARE, Fig. 9 and Eqs. 41 to 43, for additional steps that train a copy of the trained weights on one "
        "fixed batch of matching test pairs, with AdamW's defaults at the recipe's learning rate; the radius, which "
        "the paper does not specify, is the text's longest increment. The paper shows the training itself.",
    )


FIGURES = (
    FigureKind("geometry", "Geometry of the increments", measure_geometry, draw_geometry, gare_of),
    FigureKind("gradients", "Gradients by dimension", measure_gradients, draw_gradients, gare_of),
    FigureKind("steps", "Step error of the increments", measure_steps, draw_steps, gare_of),
)
