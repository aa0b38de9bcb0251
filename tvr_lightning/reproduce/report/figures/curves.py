"""Training curves, from the metrics.csv of runs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from tvr_lightning.reproduce.report.drawing import COLORS, Chart, drawings, in_style, new_panels, not_drawn
from tvr_lightning.reproduce.report.sources import ReportedRun

TITLE = "Training curves"
POINTS = 400
PANELS = {
    "train/loss": "training loss",
    "val/t2v_R@1": "text-to-video R@1 in validation, %",
    "train/temperature": "inverse temperature exp(logit_scale)",
    "lr": "learning rates",
}
"""Logged names, to which "-" or "_" may add a part, and the titles of their panels."""
COMPARED = ("train/loss", "val/t2v_R@1")
"""Panels that compare several runs."""


def read_curves(run: ReportedRun) -> dict[str, pd.Series]:
    """Return each logged metric of a run over the optimizer steps; empty if it did not train or its log is missing."""
    if run.log is None or not run.log.is_file():
        return {}
    steps = pd.read_csv(run.log).groupby("step").last()  # of each metric
    return {str(name): values.dropna() for name, values in steps.items() if name != "epoch"}


@in_style()
def draw_curves(runs: Sequence[ReportedRun]) -> Chart | None:
    """Draw what one run logged, or compare loss and validation recall of several; None if no run trained."""
    if not any(run.log for run in runs):
        return None
    panels: dict[str, dict[str, pd.Series]] = {}
    for start in PANELS if len(runs) == 1 else COMPARED:
        panels[start] = {
            (name if len(runs) == 1 else run.title): curve
            for run in runs
            for name, curve in read_curves(run).items()
            if name == start or name.startswith((f"{start}-", f"{start}_"))
        }
    drawn = {PANELS[start]: found for start, found in panels.items() if found}
    if not drawn:
        return not_drawn(TITLE, "no metrics.csv has a training loss, validation recall, temperature, or learning rates")
    most = max(map(len, drawn.values()))
    axes = new_panels(len(drawn), height=2.4 + (0.17 * most if most > 1 else 0), layout="constrained")
    for axis, (title, found) in zip(axes, drawn.items(), strict=True):
        for place, (name, curve) in enumerate(found.items()):
            kept = curve.iloc[np.unique(np.linspace(0, len(curve) - 1, min(len(curve), POINTS)).astype(int))]
            dashes = ("-", "--", ":")[place // len(COLORS) % 3]
            axis.plot(kept.index, kept, dashes, marker="o" if len(kept) < 3 else None, label=name)
        axis.set(title=title, xlabel="optimizer step")
        if len(found) > 1:
            axis.figure.legend(loc="outside lower left")
    missing = [PANELS[start] for start, found in panels.items() if not found]
    note = f"Not logged: {', '.join(missing)}." if missing else ""
    return Chart(TITLE, drawings(axes, f"Line charts over optimizer steps of {', '.join(drawn)}."), note=note)
