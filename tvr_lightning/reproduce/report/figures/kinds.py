"""Every figure of the report, measured once and kept.

A run's figures are drawn from `figures/<key>.npz` beside the cards: arrays named `<figure>.<array>`, and
`<figure>.missing`, why a figure could not be measured. The file is made from the run's checkpoint and test split by one
pass, and holds a fingerprint of the card's results, so that it is made anew once the run was repeated.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tvr_lightning.errors import UserError
from tvr_lightning.files import write_whole
from tvr_lightning.reproduce.report.figures import dpdv, gaid, gare, ncl, queries, sheet, similarity, tcmgc
from tvr_lightning.reproduce.report.figures.curves import measure_curves
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
from tvr_lightning.reproduce.report.figures.kind import FigureKind
from tvr_lightning.reproduce.runs.card import Card
from tvr_lightning.reproduce.runs.fingerprint import digest

VERSION = 4
"""Of what is measured; files of another version are made anew."""


class FiguresError(UserError, ValueError):
    """A file of figures cannot be read; the message names it."""


KINDS: tuple[FigureKind, ...] = (
    *sheet.FIGURES,
    *similarity.FIGURES,
    *ncl.FIGURES,
    *gare.FIGURES,
    *tcmgc.FIGURES,
    *gaid.FIGURES,
    *dpdv.FIGURES,
    *queries.FIGURES,
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
            again = "after fixing it, delete this run's file in figures/ to measure it again"
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
            drawn = [not_drawn("", str(own["missing"]))] if "missing" in own else list(kind.draw(own, key))
        except FAILURES as error:
            drawn = [not_drawn("", shortened(error))]
        charts += [replace(chart, title=chart.title or kind.title) for chart in drawn]
    return charts


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise FiguresError(f"{path} is damaged ({error}). Delete it and rerun `tvr report`.") from error
