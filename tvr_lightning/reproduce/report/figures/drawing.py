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
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from tvr_lightning.errors import UserError

TEXT_COLOUR = "#010203"
"""Stands for the text's own colour while matplotlib draws; a colour that no data has."""

COLOURS = ("#3b82c4", "#d9812b", "#3f9e6b", "#b8569b", "#8a7cd0", "#a08a2c")
"""Middle tones, legible on a light and on a dark ground."""

POSITIVE, NEGATIVE = COLOURS[0], COLOURS[1]

PANEL = 3.2
"""Width of a panel in inches, so narrow that its words can be read on a phone."""

Arrays = dict[str, np.ndarray]
"""What figures are drawn from, by name."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tvr",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.edgecolor": TEXT_COLOUR,
    "axes.labelcolor": TEXT_COLOUR,
    "axes.titlecolor": TEXT_COLOUR,
    "text.color": TEXT_COLOUR,
    "xtick.color": TEXT_COLOUR,
    "ytick.color": TEXT_COLOUR,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLOURS),
}


ERROR_LENGTH = 300
FAILURES = (UserError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What one figure may fail with; the others and the report go on."""


class NotDrawnError(ValueError):
    """A figure has nothing to show for a run; the message says why."""


@dataclass
class Scalar:
    """A number printed below a chart.

    Attributes:
        words: what it is.
        field: its name in the run's file of figures.
        unit: behind the number.
    """

    words: str
    field: str
    unit: str = ""


@dataclass
class Chart:
    """One picture of the page.

    Attributes:
        alt: what a reader who cannot see it is told.
        title: heading; that of its kind where it is empty.
        svg: the drawing's panels; empty where `html` is given, or where nothing is drawn and `note` says why.
        html: pictures and their captions, in place of a drawing; like the panels, markup that is not escaped again.
        scalars: numbers to print below it.
        note: sentence below it: what it corresponds to, how it was computed.
    """

    alt: str
    title: str = ""
    svg: str = ""
    html: str = ""
    scalars: list[Scalar] = field(default_factory=list)
    note: str = ""


@dataclass
class Picture:
    """Pixels that the page shows.

    Attributes:
        source: data URI.
        width, height: in pixels.
        alt: what a reader who cannot see it is told.
    """

    source: str
    width: int
    height: int
    alt: str


def not_drawn(title: str, reason: str) -> Chart:
    """Return what stands in place of a chart.

    Args:
        title: of the chart.
        reason: why there is none.
    """
    return Chart("", title, note=f"Not drawn: {reason}")


def shortened(error: BaseException) -> str:
    """Return what an error says, at most ERROR_LENGTH characters of it."""
    text = str(error) or type(error).__name__
    return text if len(text) <= ERROR_LENGTH else text[:ERROR_LENGTH] + " ..."


P = ParamSpec("P")
T = TypeVar("T")


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function draw in the report's style: legends, ticks and twin axes take it when they are made."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with matplotlib.rc_context(_STYLE):
            return function(*args, **kwargs)

    return run


def new_figure(panels: int, height: float = 2.4, width: float = PANEL) -> tuple[list[Figure], list[Axes]]:
    """Return one figure per panel, which the page sets side by side as far as there is room; for what is `styled`.

    Args:
        panels: how many.
        height, width: of a panel in inches.
    """
    figures, axes = [], []
    for _ in range(panels):
        figure = Figure(figsize=(width, height))
        axes.append(figure.subplots())
        # Fixed margins in inches: matplotlib's own layouts draw everything several times.
        figure.subplots_adjust(
            left=0.75 / width, right=1 - 0.22 / width, bottom=0.62 / height, top=1 - 0.3 / height, hspace=0.1
        )
        figures.append(figure)
    return figures, axes


def to_chart(
    figures: Sequence[Figure], name: str, alt: str, scalars: Sequence[Scalar] = (), note: str = "", title: str = ""
) -> Chart:
    """Finish panels as inline SVG.

    Args:
        figures: made by `new_figure`.
        name: unique on the page; ids within the drawing begin with it.
        alt: alternative text of the chart.
        scalars: numbers below it.
        note: sentence below it.
        title: its heading, where it has one of its own.
    """
    drawn = []
    for place, figure in enumerate(figures):
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        drawn.append(_inline(file.getvalue(), f"{name}-{place}"))
    return Chart(alt, title, svg=Markup("").join(drawn), scalars=list(scalars), note=note)


def _inline(text: str, name: str) -> Markup:
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # Black is what matplotlib falls back to where the style does not reach; no data has it.
    svg = svg.replace(TEXT_COLOUR, "currentColor").replace("#000000", "currentColor")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", svg)
    svg = re.sub(r'(?<= )(d|x|y|points|transform)="[^"]*"', lambda found: _rounded(found.group()), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r' id="(curve-[^"]*)"', r' class="\1"', svg)  # the page shows and hides it by its run
    # Several drawings share a page, so ids must not meet; those that nothing refers to go.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]*)', svg))
    svg = re.sub(
        r' id="([^"]*)"', lambda found: f' id="{name}-{found.group(1)}"' if found.group(1) in used else "", svg
    )
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return Markup(svg.replace("<svg", '<svg aria-hidden="true"', 1))


def _rounded(attribute: str) -> str:
    """Round to a tenth of a point, less than a pixel of any screen shows."""
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found.group()):.1f}".removesuffix(".0"), attribute)


def picture_of(frames: np.ndarray, alt: str) -> Picture:
    """Return frames side by side as one picture.

    Args:
        frames: (F, H, W, 3) uint8 RGB.
        alt: what a reader who cannot see it is told.
    """
    wide = np.concatenate(list(frames), axis=1)
    file = io.BytesIO()
    Image.fromarray(wide).save(file, format="JPEG", quality=78)
    source = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    return Picture(source, wide.shape[1], wide.shape[0], alt)
