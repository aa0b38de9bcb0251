"""Every figure of a run, measured once and stored.

A run's figures are drawn from `figures/<key>.npz`: arrays named `<figure>.<array>`, and `<figure>.missing`, the reason
why a figure could not be measured. The file is made from the run's checkpoint and test split in one pass, and contains
a fingerprint of the run's results, so that it is made again after the run was repeated.
"""

import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tvr_lightning.errors import UserError
from tvr_lightning.files import replace_whole
from tvr_lightning.methods import DPDV, GAID, TCMGC, VideoQuestionAnswering
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.dpdv.patch_merging import PatchFeatureMerging
from tvr_lightning.reproduce.report.drawing import FAILURES, Arrays, Chart, in_style, not_drawn, shortened
from tvr_lightning.reproduce.report.figures import any_method, dpdv, gaid, gare, tcmgc
from tvr_lightning.reproduce.report.figures import retrieval_examples as examples
from tvr_lightning.reproduce.report.figures.encoded_split import LoadedRun, encode_run
from tvr_lightning.reproduce.report.sources import ReportedRun

VERSION = 7  # of what is measured; files of other versions are made again


@dataclass(frozen=True)
class FigureType:
    """One type of figure, of the methods that `applies` accepts."""

    title: str
    measure: Callable[[Any], dict[str, Any]]
    draw: Callable[[Arrays], Iterable[Chart]]
    applies: Callable[[Any], bool] = lambda module: isinstance(module, RetrievalModule)


FIGURES = {
    "sheet": FigureType("Retrieval sheet", examples.measure_sheet, examples.draw_sheet),
    "similarity": FigureType(
        "Scores of matching and of other pairs", any_method.measure_similarity, any_method.draw_similarity
    ),
    "balance": FigureType("Retrieval mass and errors", any_method.measure_balance, any_method.draw_balance),
    "mass": FigureType(
        "Retrieval mass",
        any_method.measure_mass,
        any_method.draw_mass,
        lambda module: isinstance(module, RetrievalModule) and module.evaluation_config.normalization is not None,
    ),
    "modalities": FigureType("The two modalities", any_method.measure_modalities, any_method.draw_modalities),
    "geometry": FigureType("Geometry of the increments", gare.measure_geometry, gare.draw_geometry, gare.applies),
    "gradients": FigureType("Gradients by dimension", gare.measure_gradients, gare.draw_gradients, gare.applies),
    "hard_negatives": FigureType("Hard negatives", gare.measure_hard_negatives, gare.draw_hard_negatives, gare.applies),
    "contrasts": FigureType(
        "Balance of the contrasts",
        tcmgc.measure_contrasts,
        tcmgc.draw_contrasts,
        lambda module: isinstance(module, TCMGC),
    ),
    "attention": FigureType(
        "Attention over frames",
        tcmgc.measure_attention,
        tcmgc.draw_attention,
        lambda module: isinstance(module, TCMGC) and module.head.attention is not None,
    ),
    "map": FigureType(
        "Map of words and frames", tcmgc.measure_map, tcmgc.draw_map, lambda module: isinstance(module, TCMGC)
    ),
    "gate": FigureType(
        "Weight of the audio per frame",
        gaid.measure_gate,
        gaid.draw_gate,
        lambda module: isinstance(module, GAID) and module.head.gate is not None,
    ),
    "merging": FigureType(
        "Stages of patch merging",
        dpdv.measure_merging,
        dpdv.draw_merging,
        lambda module: isinstance(module, DPDV) and isinstance(module.reduction, PatchFeatureMerging),
    ),
    "answers": FigureType(
        "Questions and answers",
        examples.measure_answers,
        examples.draw_answers,
        lambda module: isinstance(module, VideoQuestionAnswering),
    ),
    # Only the comparison of two runs shows failures.
    "failures": FigureType("Failures", examples.measure_failures, lambda arrays: ()),
}


def figures_of(run: ReportedRun, folder: Path, trust: Sequence[str] = ()) -> Arrays:
    """Return the arrays that a run's figures are drawn from, measured unless `folder` has a current file of them.

    Measuring may also run code of modules and repositories in `trust`.
    """
    path = folder / f"{run.key}.npz"
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as file:
                found = dict(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} is damaged ({error}). Delete it and rerun `tvr report`.") from error
        if int(found.get("version", -1)) == VERSION and str(found.get("results")) == run.fingerprint:
            return found
    arrays: dict[str, Any] = {"version": VERSION, "results": run.fingerprint, **measure(encode_run(run, trust))}
    folder.mkdir(parents=True, exist_ok=True)
    with replace_whole(path) as file:
        np.savez_compressed(file, **arrays)
    return arrays


@torch.no_grad()
def measure(encoded: LoadedRun, figures: dict[str, FigureType] = FIGURES) -> Arrays:
    """Measure every figure that a method has. One that fails leaves its reason as `<figure>.missing`."""
    arrays: Arrays = {}
    for name, figure in figures.items():
        if figure.applies(encoded.module):
            try:
                own = figure.measure(encoded)
            except FAILURES as error:
                again = "after fixing it, delete this run's file in figures/ to measure it again"
                own = {"missing": f"{shortened(error)}; {again}"}
            for array, value in own.items():
                arrays[f"{name}.{array}"] = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    return arrays


@in_style()
def draw(arrays: Arrays, figures: dict[str, FigureType] = FIGURES) -> list[Chart]:
    """Draw every figure that there are arrays for; a note states why one cannot be drawn."""
    charts = []
    for name, figure in figures.items():
        own = {key.removeprefix(f"{name}."): value for key, value in arrays.items() if key.startswith(f"{name}.")}
        try:
            if "missing" in own:
                raise UserError(own["missing"])
            drawn = list(figure.draw(own)) if own else []
        except FAILURES as error:
            drawn = [not_drawn(figure.title, error)]
        for chart in drawn:
            chart.title = chart.title or figure.title
        charts += drawn
    return charts
