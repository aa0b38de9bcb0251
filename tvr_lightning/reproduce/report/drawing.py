"""Charts as files: SVG drawings with matplotlib that follow the reader's color scheme, and frames as JPEG."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image as Pixels

from tvr_lightning.errors import UserError

TEXT, DARK_TEXT = "#1d2430", "#e4e8ee"
# Middle tones, legible on a light and on a dark background. The first is for matching pairs, the second for others.
COLORS = ("#3b82c4", "#d9812b", "#3f9e6b", "#b8569b", "#8a7cd0", "#a08a2c")
PANEL = 3.2  # width in inches, so narrow that words can be read on a phone
Arrays = dict[str, np.ndarray]
# Errors of one figure after which the report continues.
FAILURES = (UserError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
    "svg.fonttype": "none", "svg.hashsalt": "tvr", "font.family": "sans-serif", "font.size": 9.0,
    "axes.titlesize": 9.0, "axes.facecolor": "none", "savefig.transparent": True, "text.parse_math": False,
    "figure.subplot.left": 0.23, "figure.subplot.right": 0.93, "figure.subplot.bottom": 0.26,
    "figure.subplot.top": 0.87, "legend.frameon": False, "legend.fontsize": 8.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.prop_cycle": cycler(color=COLORS),
}  # fmt: skip
in_style = partial(matplotlib.rc_context, STYLE)
_DARK = (
    "<style>@media (prefers-color-scheme: dark) {"
    f'[style*="fill: {TEXT}"] {{fill: {DARK_TEXT} !important}} '
    f'[style*="stroke: {TEXT}"] {{stroke: {DARK_TEXT} !important}}}}</style>'
)


@dataclass
class Image:
    """A file that a page shows; `own` marks the video that matches a query."""

    content: bytes
    suffix: str
    alt: str
    caption: str = ""
    own: bool = False
    name: str = ""  # of the file, once it is written


@dataclass
class Chart:
    """A figure of a page, with values and a note below it. If there are no images, the note states why."""

    title: str
    images: list[Image] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    note: str = ""


def not_drawn(title: str, error: object) -> Chart:
    """Return a chart that states why it is missing."""
    return Chart(title, note=f"Not drawn: {shortened(error)}")


def shortened(error: object, length: int = 300) -> str:
    """Return the message of an error in one line of limited length."""
    return textwrap.shorten(str(error) or type(error).__name__, length, placeholder=" ...")


def new_panels(count: int, height: float = 2.4, layout: Literal["constrained"] | None = None) -> list[Axes]:
    """Return the axes of panels, each a separate figure, so that a page can arrange them."""
    # The layout "constrained" has no fixed margins but doubles the time of drawing.
    return [Figure(figsize=(PANEL, height), layout=layout).subplots() for _ in range(count)]


def drawings(panels: Sequence[Axes], alt: str) -> list[Image]:
    """Return panels as SVG files; the title of a panel is added to the alternative text if there are several."""
    found = []
    for axis in panels:
        file = io.StringIO()
        assert isinstance(axis.figure, Figure)
        axis.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        content = file.getvalue().replace("<defs>", f"<defs>{_DARK}", 1).encode()
        title = axis.get_title() or axis.get_xlabel()
        found.append(Image(content, ".svg", alt if len(panels) == 1 else f"{title}. {alt}"))
    return found


def frames(strip: np.ndarray, alt: str, caption: str = "", own: bool = False) -> Image:
    """Return frames (F, H, W, 3) uint8 side by side as a JPEG file."""
    file = io.BytesIO()
    Pixels.fromarray(np.concatenate(list(strip), axis=1)).save(file, format="JPEG", quality=78)
    return Image(file.getvalue(), ".jpg", alt, caption, own)


def histograms(values: Mapping[str, np.ndarray], bins: int = 40) -> Arrays:
    """Return the share of each group of values in common bins, `edges` (bins + 1,), and each `<group>_mean`."""
    everything = np.concatenate(list(values.values()))
    edges = np.linspace(everything.min(), everything.max() + 1e-6, bins + 1)
    arrays = {"edges": edges}
    for name, own in values.items():
        arrays[name] = np.histogram(own, edges)[0] / max(len(own), 1)
        arrays[f"{name}_mean"] = np.array(own.mean() if len(own) else np.nan)
    return arrays
