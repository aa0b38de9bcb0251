"""Every figure of the report: for whom it is drawn, how it is measured, how it is drawn; measured once and kept.

A run's figures are drawn from `figures/<key>.npz` beside the cards: arrays named `<figure>.<array>`. The file is made
from the run's checkpoint and test split by one pass, and holds the fingerprint of its card.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvr_lightning.errors import UserError
from tvr_lightning.module import RetrievalModule
from tvr_lightning.reproduce.card import Card
from tvr_lightning.reproduce.report.balance import draw_balance, draw_modalities, measure_balance, measure_modalities
from tvr_lightning.reproduce.report.dpdv import (
    draw_merging,
    draw_unmatched,
    measure_merging,
    measure_unmatched,
    merging_of,
)
from tvr_lightning.reproduce.report.drawing import Arrays, Chart, styled
from tvr_lightning.reproduce.report.gaid import draw_gate, gated, measure_gate
from tvr_lightning.reproduce.report.gare import (
    draw_geometry,
    draw_gradients,
    draw_steps,
    gare_of,
    measure_geometry,
    measure_gradients,
    measure_steps,
)
from tvr_lightning.reproduce.report.material import Material, load_material
from tvr_lightning.reproduce.report.similarity import (
    draw_sheet,
    draw_similarity,
    measure_sheet,
    measure_similarity,
)
from tvr_lightning.reproduce.report.tcmgc import (
    attends,
    draw_attention,
    draw_contrasts,
    measure_attention,
    measure_contrasts,
    tcmgc_of,
)

VERSION = 2
"""Of what is measured; files of another version are made anew."""


class FiguresError(UserError, ValueError):
    """A file of figures cannot be read; the message names it."""


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure.

    Attributes:
        name: of its arrays.
        measure: from a run's material to arrays.
        draw: from the arrays to charts; told the card's key.
        applies: whether a method has such a figure.
    """

    name: str
    measure: Callable[[Material], Arrays]
    draw: Callable[[Arrays, str], list[Chart]]
    applies: Callable[[RetrievalModule], bool] = lambda module: True


def _has_gare(module: RetrievalModule) -> bool:
    return gare_of(module) is not None


KINDS: tuple[FigureKind, ...] = (
    FigureKind("similarity", measure_similarity, draw_similarity),
    FigureKind("balance", measure_balance, draw_balance),
    FigureKind("modalities", measure_modalities, draw_modalities),
    FigureKind("geometry", measure_geometry, draw_geometry, _has_gare),
    FigureKind("gradients", measure_gradients, draw_gradients, _has_gare),
    FigureKind("steps", measure_steps, draw_steps, _has_gare),
    FigureKind("contrasts", measure_contrasts, draw_contrasts, lambda module: tcmgc_of(module) is not None),
    FigureKind("attention", measure_attention, draw_attention, attends),
    FigureKind("gate", measure_gate, draw_gate, lambda module: gated(module) is not None),
    FigureKind("merging", measure_merging, draw_merging, lambda module: merging_of(module) is not None),
    FigureKind("unmatched", measure_unmatched, draw_unmatched),
    FigureKind("sheet", measure_sheet, draw_sheet),
)


def figures_of(card: Card, folder: Path, kinds: Sequence[FigureKind] = KINDS) -> Arrays:
    """Return the arrays that a run's figures are drawn from, measured unless a file of them is there.

    Args:
        card: finished.
        folder: of the files.
        kinds: of figures.

    Raises:
        UserError: weights or data that the measuring needs are gone.
        FiguresError: the file there is damaged.
    """
    path = folder / f"{card.key}.npz"
    if path.is_file():
        found = _read(path)
        if int(found.get("version", -1)) == VERSION:
            return found
    arrays = {"version": np.array(VERSION), **measure(load_material(card), kinds)}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    temporary.replace(path)
    return arrays


def measure(material: Material, kinds: Sequence[FigureKind] = KINDS) -> Arrays:
    """Measure every figure that a method has.

    Args:
        material: of a run.
        kinds: of figures.

    Returns:
        Arrays named `<figure>.<array>`.
    """
    arrays: Arrays = {}
    for kind in kinds:
        if kind.applies(material.module):
            for name, value in kind.measure(material).items():
                arrays[f"{kind.name}.{name}"] = np.asarray(value)
    return arrays


@styled
def draw(arrays: Arrays, key: str, kinds: Sequence[FigureKind] = KINDS) -> list[Chart]:
    """Draw every figure that there are arrays for.

    Args:
        arrays: from `figures_of`.
        key: of the card.
        kinds: of figures.
    """
    charts = []
    for kind in kinds:
        start = f"{kind.name}."
        own = {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}
        if own:
            charts += kind.draw(own, key)
    return charts


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FiguresError(f"{path} is damaged ({error}); delete it, and `tvr report` makes it again") from error
