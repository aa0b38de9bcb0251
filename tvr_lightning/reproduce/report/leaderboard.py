"""Leaderboards: every run once, whichever tables it is from, next to the published R@1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from tvr_lightning.reproduce.published import printed_figure
from tvr_lightning.reproduce.report.sources import Run
from tvr_lightning.reproduce.report.table_view import DIRECTIONS, TableView, warnings_of
from tvr_lightning.reproduce.report.uncertainty import Measured, measure

METRICS = ("R@1", "R@5", "R@10")
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

    @property
    def warnings(self) -> list[str]:
        """Warnings about its runs."""
        return warnings_of(self.runs)

    def measured(self, direction: str, metric: str = "R@1") -> Measured | None:
        """Return a metric of its runs."""
        return measure(self.runs, DIRECTIONS[direction], metric)

    def row(self) -> dict[tuple[str, str], str]:
        """Return its results as text, by direction and metric."""
        cells = {}
        for direction, heading in HEADINGS.items():
            for metric in METRICS:
                cells[heading, metric] = str(self.measured(direction, metric) or "–")
                if metric == "R@1":
                    printed = self.published.get(direction)
                    cells[heading, "published"] = "–" if printed is None else printed_figure(printed)
        return cells


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


def headings(entries: Sequence[Entry]) -> pd.DataFrame:
    """Return the results of entries as one table of text, without empty columns."""
    table = pd.DataFrame([entry.row() for entry in entries])
    return table.loc[:, (table != "–").any()]
