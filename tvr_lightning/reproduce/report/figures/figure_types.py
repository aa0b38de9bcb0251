"""Every figure of a run, measured once and stored.

A run's figures are drawn from `figures/<key>.npz`: arrays named `<figure>.<array>`, and `<figure>.missing`, the reason
why a figure could not be measured. The file is made from the run's checkpoint and test split in one pass, and contains a
fingerprint of the run's results, so that it is made again after the run was repeated.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tvr_lightning.errors import UserError
from tvr_lightning.files import write_whole
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.report.figures.dpdv import draw_merging, draw_unmatched, measure_merging, measure_unmatched
from tvr_lightning.reproduce.report.figures.dpdv import merging_of
from tvr_lightning.reproduce.report.figures.drawing import FAILURES, Arrays, Chart, in_style, not_drawn, shortened
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit, encode_run
from tvr_lightning.reproduce.report.figures.gaid import draw_gate, gate_of, measure_gate
from tvr_lightning.reproduce.report.figures.gare import (
    draw_geometry,
    draw_gradients,
    draw_steps,
    gare_of,
    measure_geometry,
    measure_gradients,
    measure_steps,
)
from tvr_lightning.reproduce.report.figures.ncl import (
    draw_balance,
    draw_modalities,
    measure_balance,
    measure_modalities,
)
from tvr_lightning.reproduce.report.figures.retrieval_examples import (
    draw_failures,
    draw_sheet,
    measure_failures,
    measure_sheet,
)
from tvr_lightning.reproduce.report.figures.similarity import draw_similarity, measure_similarity
from tvr_lightning.reproduce.report.figures.tcmgc import (
    attention_of,
    draw_attention,
    draw_contrasts,
    measure_attention,
    measure_contrasts,
    tcmgc_of,
)
from tvr_lightning.reproduce.report.sources import Run, digest

VERSION = 5
"""Version of what is measured; files of other versions are made again."""


@dataclass(frozen=True)
class FigureType:
    """One type of figure.

    Attributes:
        name: Prefix of its arrays.
        title: Title of its charts that have none of their own.
        measure: Function from a run's encoded test split to arrays.
        draw: Function from those arrays to charts.
        applies: Function that returns None for methods without the figure.
    """

    name: str
    title: str
    measure: Callable[[EncodedSplit], Arrays]
    draw: Callable[[Arrays], Iterator[Chart]]
    applies: Callable[[RetrievalModule], object | None] = lambda module: module


FIGURES = (
    FigureType("sheet", "Retrieval sheet", measure_sheet, draw_sheet),
    FigureType("similarity", "Scores of matching and of other pairs", measure_similarity, draw_similarity),
    FigureType("balance", "Retrieval mass and errors", measure_balance, draw_balance),
    FigureType("modalities", "The two modalities", measure_modalities, draw_modalities),
    FigureType("geometry", "Geometry of the increments", measure_geometry, draw_geometry, gare_of),
    FigureType("gradients", "Gradients by dimension", measure_gradients, draw_gradients, gare_of),
    FigureType("steps", "Step error of the increments", measure_steps, draw_steps, gare_of),
    FigureType("contrasts", "Balance of the contrasts", measure_contrasts, draw_contrasts, tcmgc_of),
    FigureType("attention", "Attention of sentence and words", measure_attention, draw_attention, attention_of),
    FigureType("gate", "Weight of the audio per frame", measure_gate, draw_gate, gate_of),
    FigureType("merging", "Stages of patch merging", measure_merging, draw_merging, merging_of),
    FigureType("unmatched", "Frames that match no word", measure_unmatched, draw_unmatched),
    FigureType("failures", "Failures", measure_failures, draw_failures),
)


def figures_of(run: Run, folder: Path) -> Arrays:
    """Return the arrays that a run's figures are drawn from, measured unless `folder` has a current file of them.

    Raises:
        UserError: Weights or data that the measurement needs are missing, or the file is damaged.
    """
    path = folder / f"{run.key}.npz"
    results = digest(run.results, run.card.checkpoint)
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is damaged ({error}). Delete it and rerun `tvr report`.") from error
        if int(found.get("version", -1)) == VERSION and str(found.get("results")) == results:
            return found
    arrays: dict[str, Any] = {"version": VERSION, "results": results, **measure(encode_run(run))}
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_whole(path, content.getvalue())
    return arrays


def measure(encoded: EncodedSplit, figures: Sequence[FigureType] = FIGURES) -> Arrays:
    """Measure every figure that a method has. One that fails leaves its reason as `<figure>.missing`."""
    arrays: Arrays = {}
    for figure in figures:
        if figure.applies(encoded.module) is not None:
            try:
                own = figure.measure(encoded)
            except FAILURES as error:
                again = "after fixing it, delete this run's file in figures/ to measure it again"
                own = {"missing": np.array(f"{shortened(error)}; {again}")}
            arrays.update({f"{figure.name}.{name}": np.asarray(value) for name, value in own.items()})
    return arrays


@in_style()
def draw(arrays: Arrays, figures: Sequence[FigureType] = FIGURES) -> list[Chart]:
    """Draw every figure that there are arrays for; a note states why one cannot be drawn."""
    charts = []
    for figure in figures:
        start = f"{figure.name}."
        own = {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}
        try:
            drawn = [not_drawn("", own["missing"])] if "missing" in own else list(figure.draw(own)) if own else []
        except FAILURES as error:
            drawn = [not_drawn("", error)]
        charts += [replace(chart, title=chart.title or figure.title) for chart in drawn]
    return charts
