"""Figures that compare runs: scores with the baseline's, normalisation errors (NCL, Fig. 2), SDR (TC-MGC, Fig. 12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from tvr_lightning.reproduce.report.cells import TableView
from tvr_lightning.reproduce.report.figures.drawing import (
    COLOURS,
    NEGATIVE,
    POSITIVE,
    Arrays,
    Chart,
    new_figure,
    not_drawn,
    styled,
    to_chart,
)
from tvr_lightning.reproduce.report.figures.tcmgc import boxes
from tvr_lightning.reproduce.runs.card import Card

SDR = "Balance of the contrasts with and without SDR"
_OVERLAID = {
    "DPDV": "DPDV, Fig. S1.",
    "GAID": "GAID, Fig. 6.",
    "GARE": "GARE, Fig. 3 (a), shows only the matching pairs.",
}
"""Papers that set the scores of their method against a baseline's, and where."""

_DIRECTIONS = {"t2v": "text to video", "v2t": "video to text"}
# What says where a run was made, not what it was.
_PLACES = ("encoder.init_args.trained_in", "data.init_args.root", "data.init_args.features")


@dataclass(frozen=True)
class Pair:
    """A table's method and the baseline that it is set against, on the same data with the same seed.

    Attributes:
        paper: of the table.
        table: name of its recipe.
        baseline, method: their finished runs.
    """

    paper: str
    table: str
    baseline: Card
    method: Card


def pairs_of(view: TableView) -> list[Pair]:
    """Return a table's runs named after its paper, such as `gaid-didemo`, each with its baseline.

    Args:
        view: the table.
    """
    paper = view.lines[0].published.paper if view.lines else ""
    start = paper.lower()
    baselines = {line.run: line.baseline for line in view.lines if line.baseline is not None}
    found = []
    for name, made in view.runs.items():
        baseline = baselines.get(name)
        if baseline is None or not (name == start or name.startswith(f"{start}-")):
            continue
        bases = {planned.seed: card for planned, card in view.runs[baseline]}
        for planned, card in made:
            base = bases.get(planned.seed)
            if card is not None and base is not None and card.status == base.status == "finished":
                found.append(Pair(paper, view.name, base, card))
    return found


@styled
def draw_between(runs: Sequence[tuple[Card, Arrays]], pairs: Sequence[Pair]) -> list[Chart]:
    """Draw every comparison that there are runs for.

    Args:
        runs: with the arrays of their figures.
        pairs: of methods and baselines.
    """
    arrays = {card.key: found for card, found in runs}
    drawn = [pair for pair in pairs if pair.baseline.key in arrays and pair.method.key in arrays]
    charts = [
        _overlaid(pair, arrays)
        for pair in drawn
        if pair.paper in _OVERLAID and all("similarity.edges" in arrays[card.key] for card in _both(pair))
    ]
    normalised = [
        pair
        for pair in drawn
        if pair.paper == "NCL" and all("balance.t2v.error" in arrays[card.key] for card in _both(pair))
    ]
    for table in sorted({pair.table for pair in normalised}):
        charts.append(_errors(table, [pair for pair in normalised if pair.table == table], arrays))
    return charts + _with_and_without(runs)


def _both(pair: Pair) -> tuple[Card, Card]:
    return pair.baseline, pair.method


def _overlaid(pair: Pair, arrays: dict[str, Arrays]) -> Chart:
    figures, (axis,) = new_figure(1)
    for card, dashes in ((pair.baseline, "--"), (pair.method, "-")):
        own = arrays[card.key]
        edges = own["similarity.edges"]
        for kind, colour in (("positive", POSITIVE), ("negative", NEGATIVE)):
            words = f"{card.name.partition('/')[2]}, {'matching' if kind == 'positive' else 'other'}"
            density = own[f"similarity.{kind}"] / np.diff(edges)  # bins of two runs are not equally wide
            axis.stairs(density, edges, color=colour, linestyle=dashes, label=words)
    axis.set_xlabel("score before post-processing")
    axis.set_ylabel("density of the pairs")
    axis.legend(fontsize=8.5)
    return to_chart(
        figures,
        f"between-{pair.baseline.key}-{pair.method.key}",
        "Histograms of the scores of matching and other pairs of two runs on one axis.",
        note=f"{_OVERLAID[pair.paper]} The baseline is dashed.",
        title=f"Scores: {pair.method.words} against {pair.baseline.words}",
    )


def _errors(table: str, pairs: Sequence[Pair], arrays: dict[str, Arrays]) -> Chart:
    figures, axes = new_figure(len(_DIRECTIONS))
    names = [str((pair.method.results or {}).get("dataset", pair.method.name)) for pair in pairs]
    for axis, (name, words) in zip(axes, _DIRECTIONS.items(), strict=True):
        for place, pair in enumerate(pairs):
            own = arrays[pair.method.key]
            after = own.get(f"balance.normalized.{name}.error", own[f"balance.{name}.error"])
            base = arrays[pair.baseline.key]
            before = base.get(f"balance.normalized.{name}.error", base[f"balance.{name}.error"])
            for shift, value, colour, label in (
                (-0.2, before, COLOURS[1], "without NCL"),
                (0.2, after, COLOURS[0], "with NCL"),
            ):
                axis.bar(place + shift, float(value), 0.38, color=colour, label=label if place == 0 else None)
        axis.set_xticks(range(len(names)), names)
        axis.set_ylabel("normalization error")
        axis.set_title(words)
        axis.margins(y=0.4)  # room for the legend
        axis.legend()
    return to_chart(
        figures,
        f"between-{table}-errors",
        "Bars of the normalization error of the baseline and of NCL, one pair per dataset, for both directions.",
        note="NCL, Fig. 2 and Eq. 5, of the scores as evaluated if a run normalizes them with its queues; the values "
        "are listed with the runs.",
        title=f"Normalization error with and without NCL: {table}",
    )


def _with_and_without(runs: Sequence[tuple[Card, Arrays]]) -> list[Chart]:
    own = [(card, found) for card, found in runs if "contrasts.softmax" in found]
    if not own:
        return []
    charts = []
    for first, second in combinations(own, 2):
        without, regularized = sorted((first, second), key=lambda run: float(run[1]["contrasts.regularization"]))
        weights = [float(run[1]["contrasts.regularization"]) for run in (without, regularized)]
        if weights[0] == 0 < weights[1] and _settings(without[0]) == _settings(regularized[0]):
            charts.append(_balance(without, regularized))
    reason = "no two of these runs differ only in the decorrelation (TC-MGC, Fig. 12)"
    return charts or [not_drawn(SDR, reason)]


def _balance(without: tuple[Card, Arrays], regularized: tuple[Card, Arrays]) -> Chart:
    figures, axes = new_figure(2)
    for axis, (card, arrays), said in ((axes[0], without, "without"), (axes[1], regularized, "with")):
        boxes(axis, arrays["contrasts.softmax"], [str(name) for name in arrays["contrasts.names"]])
        axis.set_title(f"{card.name.partition('/')[2]}, {said} SDR")
        axis.set_ylabel("share of the similarity")
        axis.set_ylim(0, 1)
    return to_chart(
        figures,
        f"between-sdr-{without[0].key}-{regularized[0].key}",
        "Box plots over matching pairs of similarities normalized over the contrasts, one panel per run.",
        note="TC-MGC, Fig. 12, over all matching pairs; normalized by a softmax over the contrasts, since the paper "
        "does not specify the normalization.",
        title=f"{SDR}: {without[0].words} and {regularized[0].words}",
    )


def _settings(card: Card) -> dict[str, Any]:
    """What decided a run besides its decorrelation and where it was made."""
    found: dict[str, Any] = {"data of the run": card.run["fingerprints"].get("data")}
    config = (card.results or {}).get("config", {})

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                if name != "decorrelation":
                    walk(part, f"{path}.{name}" if path else name)
        elif not path.endswith(_PLACES):
            found[path] = value

    walk({name: config.get(name) for name in ("seed_everything", "model", "data")}, "")
    for name in ("max_epochs", "max_steps", "precision", "gradient_clip_val", "accumulate_grad_batches"):
        found[f"trainer.{name}"] = (config.get("trainer") or {}).get(name)
    return found
