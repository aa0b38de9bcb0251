"""Every figure of the report: for whom it is drawn, how it is measured, how it is drawn; measured once and kept.

A run's figures are drawn from `figures/<key>.npz` beside the cards: arrays named `<figure>.<array>`, and
`<figure>.missing`, why a figure could not be measured. The file is made from the run's checkpoint and test split by one
pass, and holds a fingerprint of the card's results, so that it is made anew once the run was repeated.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvr_lightning.errors import UserError
from tvr_lightning.files import write_whole
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.report.figures.curves import measure_curves
from tvr_lightning.reproduce.report.figures.dpdv import (
    draw_merging,
    draw_unmatched,
    measure_merging,
    measure_unmatched,
    merging_of,
)
from tvr_lightning.reproduce.report.figures.drawing import (
    FAILURES,
    Arrays,
    Chart,
    NotDrawnError,
    not_drawn,
    shortened,
    styled,
)
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit, encode_run
from tvr_lightning.reproduce.report.figures.gaid import draw_gate, gated, measure_gate
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
from tvr_lightning.reproduce.report.figures.similarity import (
    draw_sheet,
    draw_similarity,
    measure_sheet,
    measure_similarity,
)
from tvr_lightning.reproduce.report.figures.tcmgc import (
    attending,
    draw_attention,
    draw_contrasts,
    measure_attention,
    measure_contrasts,
    tcmgc_of,
)
from tvr_lightning.reproduce.runs.card import Card
from tvr_lightning.reproduce.runs.fingerprint import digest

VERSION = 3
"""Of what is measured; files of another version are made anew."""


class FiguresError(UserError, ValueError):
    """A file of figures cannot be read; the message names it."""


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure.

    Attributes:
        name: of its arrays.
        title: of its chart where it is not drawn.
        measure: from a run's encoded test split to arrays.
        draw: from those arrays and the card's key, which makes names within a drawing unique, to charts.
        applies: to a method; None where it has no such figure.
    """

    name: str
    title: str
    measure: Callable[[EncodedSplit], Arrays]
    draw: Callable[[Arrays, str], Iterator[Chart]]
    applies: Callable[[RetrievalModule], object | None] = lambda module: module


KINDS: tuple[FigureKind, ...] = (
    FigureKind("similarity", "Scores of matching and of other pairs", measure_similarity, draw_similarity),
    FigureKind("balance", "Retrieval mass and errors", measure_balance, draw_balance),
    FigureKind("modalities", "The two modalities", measure_modalities, draw_modalities),
    FigureKind("geometry", "Geometry of the increments", measure_geometry, draw_geometry, gare_of),
    FigureKind("gradients", "Gradients by dimension", measure_gradients, draw_gradients, gare_of),
    FigureKind("steps", "Step error of the increments", measure_steps, draw_steps, gare_of),
    FigureKind("contrasts", "Balance of the contrasts", measure_contrasts, draw_contrasts, tcmgc_of),
    FigureKind(
        "attention", "Attention of sentence and words over frames", measure_attention, draw_attention, attending
    ),
    FigureKind("gate", "How much frames listen", measure_gate, draw_gate, gated),
    FigureKind("merging", "Stages of patch merging", measure_merging, draw_merging, merging_of),
    FigureKind("unmatched", "Frames that match no word", measure_unmatched, draw_unmatched),
    FigureKind("sheet", "Retrieval sheet", measure_sheet, draw_sheet),
)


def figures_of(card: Card, folder: Path, kinds: Sequence[FigureKind] = KINDS) -> Arrays:
    """Return the arrays that a run's figures are drawn from, measured unless a file of them is there.

    Args:
        card: finished; its ranks lie in `cards` beside the folder.
        folder: of the files.
        kinds: of figures.

    Raises:
        UserError: weights or data that the measuring needs are gone.
        FiguresError: the file there is damaged.
    """
    path = folder / f"{card.key}.npz"
    results = digest(card.results, card.checkpoint)
    if path.is_file():
        found = _read(path)
        if int(found.get("version", -1)) == VERSION and str(found.get("results")) == results:
            return found
    encoded = encode_run(card, folder.parent / "cards")
    arrays = {
        "version": np.array(VERSION),
        "results": np.array(results),
        **measure_curves(card),
        **measure(encoded, kinds),
    }
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    write_whole(path, content.getvalue())
    return arrays


def measure(encoded: EncodedSplit, kinds: Sequence[FigureKind] = KINDS) -> Arrays:
    """Measure every figure that a method has; one that fails leaves its reason and no other out.

    Args:
        encoded: test split of a run.
        kinds: of figures.

    Returns:
        Arrays named `<figure>.<array>`, and `<figure>.missing` for what could not be measured.
    """
    arrays: Arrays = {}
    for kind in kinds:
        if kind.applies(encoded.module) is None:
            continue
        try:
            own = {name: np.asarray(value) for name, value in kind.measure(encoded).items()}
        except NotDrawnError as error:
            own = {"missing": np.array(str(error))}
        except FAILURES as error:
            again = "once that is mended, delete this run's file in figures/ to measure it again"
            own = {"missing": np.array(f"{shortened(error)}; {again}")}
        arrays.update({f"{kind.name}.{name}": value for name, value in own.items()})
    return arrays


@styled
def draw(arrays: Arrays, key: str, kinds: Sequence[FigureKind] = KINDS) -> list[Chart]:
    """Draw every figure that there are arrays for; where one cannot be drawn, a note says why.

    Args:
        arrays: from `figures_of`.
        key: of the card.
        kinds: of figures.
    """
    charts = []
    for kind in kinds:
        start = f"{kind.name}."
        own = {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}
        if not own:
            continue
        try:
            charts += [not_drawn(kind.title, str(own["missing"]))] if "missing" in own else list(kind.draw(own, key))
        except FAILURES as error:
            charts.append(not_drawn(kind.title, shortened(error)))
    return charts


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FiguresError(f"{path} is damaged ({error}); delete it, and `tvr report` makes it again") from error
