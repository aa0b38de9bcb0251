"""Charts as inline SVG: transparent, in the colour of the text around them, with an alternative text each."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

INK = "#010203"
"""Stands for the text's own colour while matplotlib draws; a colour that no data has."""

COLOURS = ("#3b82c4", "#d9812b", "#3f9e6b", "#b8569b", "#8a7cd0", "#a08a2c")
"""Middle tones, legible on a light and on a dark ground."""

POSITIVE, NEGATIVE = COLOURS[0], COLOURS[1]

Arrays = dict[str, np.ndarray]
"""What figures are drawn from, by name."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tvr",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLOURS),
}


@dataclass
class Fact:
    """A number said below a chart.

    Attributes:
        words: what it is.
        field: name of the scalar in the run's figures file.
        unit: behind the number.
    """

    words: str
    field: str
    unit: str = ""


@dataclass
class Chart:
    """One picture of the page.

    Attributes:
        title: heading.
        alt: what a reader who cannot see it is told.
        svg: the drawing; empty where `html` is given.
        html: pictures and their captions, in place of a drawing.
        facts: numbers to print below it.
        note: sentence below it: what it corresponds to, how it was computed.
    """

    title: str
    alt: str
    svg: str = ""
    html: str = ""
    facts: list[Fact] = field(default_factory=list)
    note: str = ""


P = ParamSpec("P")
T = TypeVar("T")


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function draw in the report's style: legends, ticks and twin axes take it when they are made."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with matplotlib.rc_context(_STYLE):
            return function(*args, **kwargs)

    return run


def new_figure(panels: int, height: float = 2.4, width: float = 3.4) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with panels in rows of two; called by what is `styled`.

    Args:
        panels: how many.
        height, width: of a panel in inches.
    """
    columns = min(panels, 2)
    rows = -(-panels // columns)
    wide, high = width * columns, height * rows
    figure = Figure(figsize=(wide, high))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    # Fixed margins in inches: matplotlib's own layouts draw everything several times.
    figure.subplots_adjust(
        left=0.75 / wide,
        right=1 - 0.1 / wide,
        bottom=0.5 / high,
        top=1 - 0.3 / high,
        wspace=0.75 / (width - 0.8),
        hspace=0.7 / (height - 0.75),
    )
    for spare in axes[panels:]:
        spare.set_axis_off()
    return figure, list(axes[:panels])


def to_chart(figure: Figure, name: str, title: str, alt: str, facts: Sequence[Fact] = (), note: str = "") -> Chart:
    """Finish a figure as inline SVG.

    Args:
        figure: made by `new_figure`.
        name: unique on the page; ids within the drawing begin with it.
        title: heading of the chart.
        alt: its alternative text.
        facts: numbers below it.
        note: sentence below it.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return Chart(title, alt, svg=_inline(file.getvalue(), name, alt), facts=list(facts), note=note)


def _inline(text: str, name: str, alt: str) -> str:
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    # Black is what matplotlib falls back to where the style does not reach; no data has it.
    svg = svg.replace(INK, "currentColor").replace("#000000", "currentColor")
    # Several drawings share a page, so ids must not meet.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def escape(text: object) -> str:
    """Return text that is safe in HTML, in attributes too."""
    words = str(text)
    for raw, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        words = words.replace(raw, safe)
    return words


def picture_uri(pixels: np.ndarray) -> str:
    """Return a picture as a data URI.

    Args:
        pixels: (H, W, 3) uint8 RGB.
    """
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=78)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
