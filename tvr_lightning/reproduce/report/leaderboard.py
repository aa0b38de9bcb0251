"""Leaderboards: every run once, whichever tables it is from, next to the published R@1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from tvr_lightning.reproduce.published import printed_figure
from tvr_lightning.reproduce.report.sources import Run
from tvr_lightning.reproduce.report.table_view import DIRECTIONS, TableView, warnings_of
from tvr_lightning.reproduce.report.uncertainty import Measured, measure

HEADINGS = {"t2v": "text to video", "v2t": "video to text"}
NOT_STATED = "not stated"


@dataclass
class Entry:
    """A method on a dataset.

    Attributes:
        name: Method.
        runs: Its runs, one per seed.
        dataset, backbone: As published, else as its run states.
        view: First table that publishes its R@1, or None for a run of no table.
        published: Published R@1 by direction.
    """

    name: str
    runs: list[Run]
    dataset: str
    backbone: str
    view: TableView | None = None
    published: dict[str, float] = field(default_factory=dict)

    def measured(self, direction: str, metric: str = "R@1") -> Measured | None:
        """Return a metric of its runs."""
        return measure(self.runs, DIRECTIONS[direction], metric)

    def row(self, synthetic: bool) -> dict[tuple[str, str], str]:
        """Return the entry as text by columns; warnings about synthetic data only if `synthetic`."""
        marks = [mark for mark in warnings_of(self.runs) if synthetic or mark != "synthetic"]
        cells = {("method", ""): self.name + (f" [{', '.join(marks)}]" if marks else "")}
        for direction, heading in HEADINGS.items():
            found, printed = self.measured(direction), self.published.get(direction)
            cells[heading, "R@1"] = str(found or "–")
            cells[heading, "published"] = "–" if printed is None else printed_figure(printed)
            for metric in ("R@5", "R@10"):
                cells[heading, metric] = (
                    "–" if (other := self.measured(direction, metric)) is None else f"{other.mean:.1f}"
                )
        return cells | {("backbone", ""): self.backbone, ("table", ""): self.view.title if self.view else "–"}


def leaderboards(views: Sequence[TableView], runs: Sequence[Run]) -> dict[str, list[Entry]]:
    """Return the measured entries of each dataset, the highest text-to-video R@1 first.

    Args:
        views: Tables.
        runs: All runs; without tables, each is an entry.
    """
    found: dict[str, Entry] = {}
    for view in views:
        for name, own in view.finished.items():
            rows = view.results[view.results["run"] == name]
            first, printed = rows.iloc[0], rows[rows["metric"] == "R@1"].set_index("direction")["published"].dropna()
            entry = Entry(first["name"], own, first["dataset"] or own[0].dataset, first["backbone"] or NOT_STATED, view)
            known = found.setdefault(first["cards"], entry)
            if not known.published:
                known.view = view
            known.published = {**printed.to_dict(), **known.published}
    if not views:
        found = {run.key: _plain(run) for run in runs}
    ranked = [(value.mean, entry) for entry in found.values() if (value := entry.measured("t2v")) is not None]
    boards: dict[str, list[Entry]] = {}
    for _, entry in sorted(ranked, key=lambda pair: -pair[0]):
        boards.setdefault(entry.dataset, []).append(entry)
    return boards


def _plain(run: Run) -> Entry:
    encoder = run.results["config"].get("model", {}).get("init_args", {}).get("encoder") or {}
    backbone = encoder.get("init_args", {}).get("architecture") or NOT_STATED
    return Entry(f"{run.results['method']}, {run.title}", [run], run.dataset, backbone)


def board(entries: Sequence[Entry], synthetic: bool) -> pd.DataFrame:
    """Return a leaderboard as text, without empty columns."""
    table = pd.DataFrame([entry.row(synthetic) for entry in entries])
    table.columns = pd.MultiIndex.from_tuples(table.columns)
    return table.loc[:, (table != "–").any()]
