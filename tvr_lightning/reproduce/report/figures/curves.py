"""Training curves of a run, from the TensorBoard events beside its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from tvr_lightning.reproduce.report.figures.drawing import (
    COLOURS,
    FAILURES,
    Arrays,
    Chart,
    Scalar,
    new_figure,
    not_drawn,
    shortened,
    styled,
    to_chart,
)
from tvr_lightning.reproduce.report.render import render
from tvr_lightning.reproduce.runs.card import Card

TITLE = "Training curves"

OVERLAID = ("train/loss", "val/t2v_R@1")
"""Curves that are drawn for several runs over one axis."""

_POINTS = 400
_DASHES = {"solid": "-", "dashed": "--", "dotted": ":"}
# What a tag begins with; $ is its end.
_PANELS = (
    ("train/loss", "training loss"),
    ("val/t2v_R@1$", "text-to-video R@1 in validation, %"),
    ("train/temperature", "inverse temperature exp(logit_scale)"),
    ("lr", "learning rates"),
)


def read_curves(card: Card) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read what the training run behind a card logged; empty where its events are gone or it only evaluated.

    Args:
        card: finished, with a checkpoint in the folder that Lightning logged to.

    Returns:
        Name of each logged value to its (K,) int64 optimiser steps, rising, and (K,) float64 values.
    """
    if card.checkpoint is None or card.run["verb"] != "fit":
        return {}
    folder = Path(card.checkpoint).parent.parent
    points: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("tensor") and value.tag != "hp_metric":
                    array = make_ndarray(value.tensor)
                    if array.size == 1 and array.dtype.kind == "f":
                        points.setdefault(value.tag, {})[int(event.step)] = float(array)
    return {
        tag: (np.array(sorted(found)), np.array([found[step] for step in sorted(found)]))
        for tag, found in points.items()
    }


def measure_curves(card: Card) -> Arrays:
    """Return what the training run behind a card logged, as arrays of its file of figures.

    Args:
        card: finished.

    Returns:
        `curves.<tag>.steps` (K,) int64 and `curves.<tag>.values` (K,) float64 of each curve, and the scalars
        `curves.loss_first` and `curves.loss_last`; or `curves.missing`, why there are none.
    """
    try:
        curves = read_curves(card)
    except FAILURES as error:
        return {"curves.missing": np.array(f"the training log cannot be read: {shortened(error)}")}
    if not curves:
        reason = "the training log of the run is missing" if card.run["verb"] == "fit" else "the run did not train"
        return {"curves.missing": np.array(reason)}
    arrays: Arrays = {}
    for tag, (steps, values) in curves.items():
        arrays[f"curves.{tag}.steps"], arrays[f"curves.{tag}.values"] = steps, values
        if tag == "train/loss":
            arrays["curves.loss_first"], arrays["curves.loss_last"] = np.array(values[0]), np.array(values[-1])
    return arrays


@styled
def draw_curves(arrays: Arrays, key: str, kept: bool) -> list[Chart]:
    """Draw loss, validation recall, temperature and learning rates over the steps.

    Args:
        arrays: from `measure_curves`, others among them.
        key: of the card, so that names within the drawing are unique.
        kept: whether the arrays are in the run's file of figures; numbers are said of such alone.
    """
    if "curves.missing" in arrays:
        return [not_drawn(TITLE, str(arrays["curves.missing"]))]
    tags = [
        name.removeprefix("curves.").removesuffix(".steps")
        for name in arrays
        if name.startswith("curves.") and name.endswith(".steps")
    ]
    panels, unlogged = [], []
    for start, title in _PANELS:
        found = [tag for tag in tags if f"{tag}$".startswith(start)]
        if found:
            panels.append((title, found))
        else:
            unlogged.append(title)
    if not panels:
        return [not_drawn(TITLE, "the run logged no loss, validation recall, temperature, or learning rates")]
    figures, axes = new_figure(len(panels))
    for axis, (title, found) in zip(axes, panels, strict=True):
        for tag in found:
            steps, values = arrays[f"curves.{tag}.steps"], arrays[f"curves.{tag}.values"]
            marker = "o" if len(steps) < 3 else None
            axis.plot(steps, values, marker=marker, label=tag.partition("/")[2] or tag)
        axis.set_title(title)
        axis.set_xlabel("optimizer step")
        if len(found) > 1:
            axis.legend()
    scalars = [Scalar("first training loss", "curves.loss_first"), Scalar("last", "curves.loss_last")]
    return [
        to_chart(
            figures,
            f"{key}-curves",
            f"Line charts over optimizer steps of {', '.join(title for title, _ in panels)}.",
            scalars if kept and "curves.loss_first" in arrays else [],
            f"Not logged: {', '.join(unlogged)}." if unlogged else "",
            TITLE,
        )
    ]


@styled
def draw_overlaid(runs: Sequence[tuple[Card, Arrays]]) -> list[Chart]:
    """Draw loss and validation recall of the runs on the same data over one axis, one chart per dataset.

    Args:
        runs: with their arrays from `measure_curves`, others among them.
    """
    datasets: dict[str, list[tuple[Card, Arrays]]] = {}
    for card, arrays in runs:
        if any(f"curves.{tag}.steps" in arrays for tag in OVERLAID):
            datasets.setdefault(str((card.results or {}).get("dataset", card.run["dataset"])), []).append(
                (card, arrays)
            )
    return [_overlaid(dataset, own) for dataset, own in datasets.items() if len(own) > 1]


def _overlaid(dataset: str, runs: list[tuple[Card, Arrays]]) -> Chart:
    titles = {tag: title for tag in OVERLAID for start, title in _PANELS if tag == start.removesuffix("$")}
    shown = [tag for tag in OVERLAID if any(f"curves.{tag}.steps" in arrays for _, arrays in runs)]
    figures, axes = new_figure(len(shown))
    styles = [(colour, dashes) for dashes in _DASHES for colour in COLOURS]
    legend = []
    for place, (card, arrays) in enumerate(runs):
        colour, dashes = styles[place % len(styles)]
        legend.append({"key": card.key, "words": card.words, "colour": colour, "line": dashes})
        for tag, axis in zip(shown, axes, strict=True):
            if f"curves.{tag}.steps" in arrays:
                steps, values = arrays[f"curves.{tag}.steps"], arrays[f"curves.{tag}.values"]
                kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _POINTS)).round().astype(int))
                axis.plot(
                    steps[kept],
                    values[kept],
                    color=colour,
                    linestyle=_DASHES[dashes],
                    marker="o" if len(steps) < 3 else None,
                    gid=f"curve-{card.key}",
                )
    for tag, axis in zip(shown, axes, strict=True):
        axis.set_title(titles[tag])
        axis.set_xlabel("optimizer step")
    alt = f"Line charts over optimizer steps of {' and '.join(titles[tag] for tag in shown)}, one line per run."
    drawn = to_chart(figures, f"overlaid-{dataset.replace(' ', '-')}", alt)
    return Chart(
        alt, f"Training curves of several runs: {dataset}", html=render("overlaid.html", runs=legend, chart=drawn)
    )
