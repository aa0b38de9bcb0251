"""The chart at the top: what was measured, with its intervals, beside what is printed."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from tvr_lightning.reproduce.report.cells import BLOCKS
from tvr_lightning.reproduce.report.figures.drawing import COLOURS, PANEL, Chart, new_figure, styled, to_chart
from tvr_lightning.reproduce.report.leaderboard import Entry

MOST_RUNS = 24
"""Of a dataset: more could not be told apart."""
_NAME = 40
"""Letters of a method that fit above its marks on a phone."""


@styled
def draw_overview(entries: Sequence[Entry]) -> list[Chart]:
    """Draw R@1 of the best runs of every dataset, one panel per direction.

    Args:
        entries: of the leaderboard, in its order.
    """
    datasets: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.cards:
            datasets.setdefault(entry.dataset, []).append(entry)
    return [_chart(dataset, own) for dataset, own in datasets.items()]


def _chart(dataset: str, entries: list[Entry]) -> Chart:
    shown = entries[:MOST_RUNS]
    directions = [name for name in ("t2v", "v2t") if any(entry.measured(name) is not None for entry in shown)]
    figures, axes = new_figure(len(directions), height=1.3 + 0.36 * len(shown))
    for figure, axis, direction in zip(figures, axes, directions, strict=True):
        figure.subplots_adjust(left=0.22 / PANEL)  # nothing stands beside the axis
        for place, entry in enumerate(shown):
            axis.annotate(
                _label(entry, shown), (0, place), (0, 5), xycoords=("axes fraction", "data"), textcoords="offset points"
            )
            _warnings(axis, place, entry, direction)
        axis.set_ylim(len(shown) - 0.5, -0.9)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
        axis.set_xlabel("R@1, %")
        axis.set_title(BLOCKS[direction])
    axes[0].scatter([], [], color=COLOURS[0], label="measured")
    if any(entry.view.comparable for entry in shown):
        axes[0].scatter([], [], marker="D", facecolors="none", edgecolors=COLOURS[1], label="published")
    figures[0].legend(loc="lower left", ncols=2, borderaxespad=0.1)
    left_out = " Only the best runs of this dataset are drawn." if len(entries) > len(shown) else ""
    unlike = "" if all(entry.view.comparable for entry in shown) else " Runs that are not comparable have no such dot."
    return to_chart(
        figures,
        f"overview-{dataset.replace(' ', '-')}",
        f"Dots of the measured R@1 of {dataset} with intervals, next to the published R@1; the leaderboard lists the "
        "values.",
        note=f"Bars are 95 % intervals over queries; the papers publish none.{left_out}{unlike}",
        title=f"Published and measured: {dataset}",
    )


def _label(entry: Entry, shown: Sequence[Entry]) -> str:
    """Return the method, with what tells it from others of its name."""
    name = entry.line.names[0] or ""
    alike = [other for other in shown if other.line.names[0] == name]
    told = f" {entry.backbone}" if len({other.backbone for other in alike}) > 1 else ""
    told += f" [{', '.join(entry.line.warnings)}]" if entry.line.warnings else ""
    room = max(_NAME - len(told), 12)
    return f"{name if len(name) <= room else f'{name[: room - 1]}…'}{told}"


def _warnings(axis: Axes, place: int, entry: Entry, direction: str) -> None:
    line = entry.lines.get(direction)
    found = line.measured("R@1") if line else None
    if found is not None:
        axis.scatter(found.mean, place, color=COLOURS[0], s=22, zorder=3)
        if found.interval is not None:
            axis.plot([found.interval.low, found.interval.high], [place, place], color=COLOURS[0], linewidth=2)
    printed = entry.published(direction)
    if entry.view.comparable and printed is not None:
        axis.scatter(printed, place, marker="D", facecolors="none", edgecolors=COLOURS[1], s=26, zorder=4)
