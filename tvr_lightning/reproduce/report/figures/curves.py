"""Training curves of a run, from the TensorBoard events beside its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from tvr_lightning.reproduce.report.figures.drawing import (
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
from tvr_lightning.reproduce.runs.card import Card

TITLE = "Training curves"

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
        reason = (
            "no training log lies beside the run's weights" if card.run["verb"] == "fit" else "the run trained nothing"
        )
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
        return [not_drawn(TITLE, "the run logged none of loss, validation recall, temperature and learning rates")]
    figures, axes = new_figure(len(panels))
    for axis, (title, found) in zip(axes, panels, strict=True):
        for tag in found:
            steps, values = arrays[f"curves.{tag}.steps"], arrays[f"curves.{tag}.values"]
            marker = "o" if len(steps) < 3 else None
            axis.plot(steps, values, marker=marker, label=tag.partition("/")[2] or tag)
        axis.set_title(title)
        axis.set_xlabel("optimiser step")
        if len(found) > 1:
            axis.legend()
    scalars = [Scalar("first training loss", "curves.loss_first"), Scalar("last", "curves.loss_last")]
    return [
        to_chart(
            figures,
            f"{key}-curves",
            f"Line charts over optimiser steps of {', '.join(title for title, _ in panels)}.",
            scalars if kept and "curves.loss_first" in arrays else [],
            f"Not logged: {', '.join(unlogged)}." if unlogged else "",
            TITLE,
        )
    ]
