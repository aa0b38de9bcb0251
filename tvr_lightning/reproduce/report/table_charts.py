"""Charts that compare runs: R@1, training curves, scores, normalization errors (NCL), SDR (TC-MGC)."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np
import pandas as pd

from tvr_lightning.reproduce.report.drawing import COLORS, Arrays, Chart, drawings, in_style, new_panels
from tvr_lightning.reproduce.report.figures.any_method import DIRECTIONS
from tvr_lightning.reproduce.report.figures.tcmgc import boxes
from tvr_lightning.reproduce.report.sources import ReportedRun, read_curves
from tvr_lightning.reproduce.report.table_view import TableView

# Papers that compare the scores of their method with a baseline's, and where.
OVERLAID = {"DPDV": "Fig. S1.", "GAID": "Fig. 6.", "GARE": "Fig. 3 (a), shows only the matching pairs."}
CURVES = "Training curves"
POINTS = 400
PANELS = {  # by logged names, to which "-" or "_" may add a part; the first two compare runs
    "train/loss": "training loss",
    "val/t2v_R@1": "text-to-video R@1 in validation, %",
    "train/temperature": "inverse temperature exp(logit_scale)",
    "lr": "learning rates",
}
Pair = tuple[ReportedRun, ReportedRun]  # of a baseline and of a method, on the same data with the same seed


@in_style()
def draw_curves(runs: Sequence[ReportedRun]) -> Chart | None:
    """Draw what one run logged, or compare loss and validation recall of several; None if no run trained."""
    if not any(run.log for run in runs):
        return None
    drawn: dict[str, dict[str, pd.Series]] = {}
    for start in [*PANELS] if len(runs) == 1 else [*PANELS][:2]:
        drawn[PANELS[start]] = {
            (name if len(runs) == 1 else run.title): curve
            for run in runs
            for name, curve in read_curves(run).items()
            if len(curve) > 1 and (name == start or name.startswith((f"{start}-", f"{start}_")))
        }
    missing = [title for title, curves in drawn.items() if not curves]
    note = f"A curve needs two logged values or more. Without curves: {', '.join(missing)}." if missing else ""
    if len(missing) == len(drawn):
        return Chart(CURVES, note=note)
    drawn = {title: curves for title, curves in drawn.items() if curves}
    most = max(map(len, drawn.values()))
    axes = new_panels(len(drawn), height=2.4 + (0.17 * most if most > 1 else 0), layout="constrained")
    for axis, (title, curves) in zip(axes, drawn.items(), strict=True):
        for place, (name, curve) in enumerate(curves.items()):
            kept = curve.iloc[np.unique(np.linspace(0, len(curve) - 1, min(len(curve), POINTS)).astype(int))]
            dashes = ("-", "--", ":")[place // len(COLORS) % 3]
            axis.plot(kept.index, kept, dashes, label=name)
        axis.set(title=title, xlabel="optimizer step")
        axis.locator_params("x", integer=True)
        for videos in _validation_videos(runs) if "R@1" in title else ():
            axis.axhline(100 / videos, color=COLORS[4], linewidth=0.8, label=f"chance, {videos} videos")
        if len(axis.lines) > 1:
            axis.figure.legend(loc="outside lower left")
    images = drawings(axes, f"Line charts over optimizer steps of {', '.join(drawn)}.")
    return Chart(CURVES, images, note=note)


def _validation_videos(runs: Sequence[ReportedRun]) -> set[int]:
    """Return the numbers of validation videos, if the runs validated on their test split or on training videos."""
    on_test = {int(run.results["videos"]) for run in runs if run.results.get("select_on") == "test"}
    held_out = {int(run.settings().get("data.init_args.holdout", 0)) for run in runs if run.finished}
    return on_test or held_out - {0}


@in_style()
def draw_table(view: TableView, arrays: Mapping[str, Arrays]) -> list[Chart]:
    """Draw every comparison that the runs of a table, and the arrays of their figures by key, allow."""
    runs = [run for own in view.finished.values() for run in own]
    charts = [chart for chart in (_recalls(view), draw_curves(runs) if len(runs) > 1 else None) if chart]
    paper = view.title.partition(",")[0]
    needed = "balance.t2v.error" if paper == "NCL" else "similarity.edges"
    pairs = [pair for pair in _pairs(view, paper.lower()) if all(needed in arrays.get(run.key, {}) for run in pair)]
    if paper in OVERLAID:
        charts += [_scores(pair, arrays, f"{paper}, {OVERLAID[paper]}") for pair in pairs]
    if paper == "NCL" and pairs:
        charts.append(_errors(pairs, arrays))
    return [*charts, *_with_and_without(runs, arrays)]


def _pairs(view: TableView, paper: str) -> list[Pair]:
    """Return a table's runs that are named after its paper, such as `gaid-didemo`, each with its baseline."""
    compared = view.results.dropna(subset=["baseline"]).drop_duplicates("run")
    return [
        (base, method)
        for name, baseline in zip(compared["run"], compared["baseline"], strict=True)
        if f"{name}-".startswith(f"{paper}-")
        for method in view.finished[name]
        for base in view.finished[baseline]
        if base.seed == method.seed
    ]


def _recalls(view: TableView) -> Chart | None:
    rows = view.results[(view.results["metric"] == "R@1") & view.results["measured"].notna()]
    drawn = {words: own for name, words in DIRECTIONS.items() if len(own := rows[rows["direction"] == name])}
    if not drawn:
        return None
    compared = not view.caution and rows["published"].notna().any()
    axes = new_panels(len(drawn), height=1.2 + 0.32 * max(map(len, drawn.values())), layout="constrained")
    for axis, (title, own) in zip(axes, drawn.items(), strict=True):
        places = np.arange(len(own))
        axis.scatter(own["measured"], places, color=COLORS[0], s=22, label="measured")
        chance = [100 / view.finished[run][0].results["videos"] for run in own["run"]]
        axis.plot(chance, places, "|", color=COLORS[4], markersize=12, label="chance")
        axis.hlines(places, own["low"].astype(float), own["high"].astype(float), color=COLORS[0], linewidth=2)
        if compared and own["published"].notna().any():
            axis.plot(own["published"], places, "D", fillstyle="none", color=COLORS[1], label="published")
        axis.set_yticks(places, own["run"])
        axis.invert_yaxis()
        axis.set(xlabel="R@1, %", title=title)
        axis.figure.legend(loc="outside lower left", ncols=2)
    alt = "Dots of the measured R@1 of each run with intervals, next to the published R@1; the table lists the values."
    note = "Bars are 95 % intervals over queries" + ("; the papers publish none." if compared else ".")
    return Chart("Published and measured" if compared else "Measured R@1", drawings(axes, alt), note=note)


def _scores(pair: Pair, arrays: Mapping[str, Arrays], note: str) -> Chart:
    (axis,) = new_panels(1, height=3, layout="constrained")
    for run, dashes in zip(pair, ("--", "-"), strict=True):
        own = arrays[run.key]
        name = run.card.name.partition("/")[2]
        edges = own["similarity.edges"]
        for kind, pairs, color in (("positive", "matching", COLORS[0]), ("negative", "other", COLORS[1])):
            density = own[f"similarity.{kind}"] / np.diff(edges)  # bins of two runs are not equally wide
            axis.stairs(density, edges, color=color, linestyle=dashes, label=f"{name}, {pairs}")
    axis.set(xlabel="score before post-processing", ylabel="density of the pairs")
    axis.figure.legend(loc="outside lower left", ncols=2)
    images = drawings([axis], "Histograms of the scores of matching and other pairs of two runs on one axis.")
    return Chart(f"Scores: {pair[1].title} against {pair[0].title}", images, note=f"{note} The baseline is dashed.")


def _errors(pairs: list[Pair], arrays: Mapping[str, Arrays]) -> Chart:
    axes = new_panels(len(DIRECTIONS), height=3, layout="constrained")
    for axis, (name, words) in zip(axes, DIRECTIONS.items(), strict=True):
        for side, label in enumerate(("without NCL", "with NCL")):
            own = [arrays[pair[side].key] for pair in pairs]
            errors = [float(one.get(f"balance.normalized.{name}.error", one[f"balance.{name}.error"])) for one in own]
            axis.bar(np.arange(len(pairs)) + 0.4 * side - 0.2, errors, 0.38, color=COLORS[1 - side], label=label)
        axis.set_xticks(range(len(pairs)), [method.dataset for _, method in pairs])
        axis.set(ylabel="normalization error", title=words)
        axis.figure.legend(loc="outside lower left", ncols=2)
    images = drawings(axes, "Bars of the normalization error of the baseline and of NCL, one pair per dataset.")
    note = "NCL, Fig. 2 and Eq. 5; if a run normalizes its scores with its queues, of the normalized scores."
    return Chart("Normalization error with and without NCL", images, note=note)


def _with_and_without(runs: list[ReportedRun], arrays: Mapping[str, Arrays]) -> Iterator[Chart]:
    """Yield a chart for each two runs that differ in their decorrelation alone."""
    for pair in permutations([run for run in runs if "contrasts.softmax" in arrays.get(run.key, {})], 2):
        without, regularized = (float(arrays[run.key]["contrasts.regularization"]) for run in pair)
        if without > 0 or regularized == 0 or _settings(pair[0]) != _settings(pair[1]):
            continue
        axes = new_panels(2)
        for axis, run, words in zip(axes, pair, ("without", "with"), strict=True):
            boxes(axis, arrays[run.key]["contrasts.softmax"], arrays[run.key]["contrasts.names"])
            title = f"{run.card.name.partition('/')[2]}, {words} SDR"
            axis.set(title=title, ylabel="share of the similarity", ylim=(0, 1))
        title = f"Balance of the contrasts with and without SDR: {pair[0].title} and {pair[1].title}"
        images = drawings(axes, "Box plots over matching pairs of similarities normalized over the contrasts.")
        note = "TC-MGC, Fig. 12, over all matching pairs; the paper does not specify the normalization, here a softmax."
        yield Chart(title, images, note=note)


def _settings(run: ReportedRun) -> dict[str, str]:
    """Return the settings and data that determined a run, except its decorrelation."""
    own = {name: value for name, value in run.settings().items() if ".decorrelation" not in name}
    return own | {"fingerprint of the data": run.data}
