"""Geometry of GARE's increments in the course of training, from the metrics.csv of a run (GARE, Fig. 8)."""

from __future__ import annotations

from tvr_lightning.reproduce.report.drawing import COLORS, Chart, drawings, in_style, new_panels
from tvr_lightning.reproduce.report.figures.curves import read_curves
from tvr_lightning.reproduce.report.figures.gare import GEOMETRY
from tvr_lightning.reproduce.report.sources import ReportedRun


@in_style()
def draw_course(run: ReportedRun) -> Chart | None:
    """Draw the logged geometry of matching and of other pairs; None if the run did not log it."""
    curves = read_curves(run)
    if not any(name.startswith("train/angle_to_gap") for name in curves):
        return None
    axes = new_panels(len(GEOMETRY))
    for axis, (words, names) in zip(axes, GEOMETRY.items(), strict=True):
        for name in names:
            before = len(names) > 1 and name == names[0]
            for pairs, color in (("matching", COLORS[0]), ("other", COLORS[1])):
                curve = curves.get(f"train/{name}-{pairs}")
                label, dashes = (f"{pairs}, before", "--") if before else (pairs, "-")
                if curve is not None:
                    axis.plot(curve.index, curve, dashes, color=color, label=label)
        axis.set(xlabel="optimizer step", ylabel=words)
        axis.legend()
    alt = "Lines over training of the increments' angles and lengths, and of the distances of texts and videos."
    note = (
        "GARE, Fig. 8: means over pairs of a training batch, without dropout; values before the correction are dashed."
    )
    return Chart("Geometry of the increments during training", drawings(axes, alt), note=note)
