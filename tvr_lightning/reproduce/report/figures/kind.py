"""One kind of figure: for whom it is drawn, how it is measured, how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.report.figures.drawing import Arrays, Chart
from tvr_lightning.reproduce.report.figures.encoded_split import EncodedSplit


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure.

    Attributes:
        name: of its arrays.
        title: of its charts, where they have none of their own.
        measure: from a run's encoded test split to arrays.
        draw: from those arrays and the card's key, which makes names within a drawing unique, to charts.
        applies: to a method; None where it has no such figure.
    """

    name: str
    title: str
    measure: Callable[[EncodedSplit], Arrays]
    draw: Callable[[Arrays, str], Iterator[Chart]]
    applies: Callable[[RetrievalModule], object | None] = lambda module: module
