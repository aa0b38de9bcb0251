"""Training curves of a run, from the TensorBoard events beside its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from tvr_lightning.reproduce.card import Card
from tvr_lightning.reproduce.report.drawing import Chart, new_figure, styled, to_chart

# What a tag begins with; $ is its end.
_PANELS = (
    ("train/loss", "training loss"),
    ("val/t2v_R@1$", "text-to-video R@1 in validation, %"),
    ("train/temperature", "inverse temperature exp(logit_scale)"),
    ("lr", "learning rates"),
)


@dataclass
class Curve:
    """One logged value.

    Attributes:
        steps: (K,) int64, optimiser steps, rising.
        values: (K,) float64.
    """

    steps: np.ndarray
    values: np.ndarray


def read_curves(card: Card) -> dict[str, Curve]:
    """Read what the training run behind a card logged; empty where its events are gone or it only evaluated.

    Args:
        card: finished, with a checkpoint in the folder that Lightning logged to.
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
        tag: Curve(np.array(sorted(found)), np.array([found[step] for step in sorted(found)]))
        for tag, found in points.items()
    }


@styled
def draw_curves(curves: dict[str, Curve], key: str) -> list[Chart]:
    """Draw loss, validation recall, temperature and learning rates over the steps; none where nothing was logged.

    Args:
        curves: by tag.
        key: of the card, so that names within the drawing are unique.
    """
    panels = []
    for start, title in _PANELS:
        found = {tag: curve for tag, curve in curves.items() if f"{tag}$".startswith(start)}
        if found:
            panels.append((title, found))
    if not panels:
        return []
    figure, axes = new_figure(len(panels))
    for axis, (title, found) in zip(axes, panels, strict=True):
        for tag, curve in found.items():
            marker = "o" if len(curve.steps) < 3 else None
            axis.plot(curve.steps, curve.values, marker=marker, label=tag.partition("/")[2] or tag)
        axis.set_title(title)
        axis.set_xlabel("optimiser step")
        if len(found) > 1:
            axis.legend()
    loss = curves.get("train/loss")
    said = f"The loss goes from {loss.values[0]:.3g} to {loss.values[-1]:.3g}." if loss is not None else ""
    return [
        to_chart(
            figure,
            f"{key}-curves",
            "Training curves",
            f"Line charts over optimiser steps of {', '.join(title for title, _ in panels)}. {said}",
        )
    ]
