"""The leaderboard: every run once, and what is only published, whichever table it is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvr_lightning.reproduce.report.cells import DIRECTIONS, Line, TableView
from tvr_lightning.reproduce.runs.card import Card

UNSAID = "not stated"


@dataclass
class Entry:
    """A method on a dataset.

    Attributes:
        view: of the table whose lines it shows.
        lines: by direction, `t2v` and `v2t`.
    """

    view: TableView
    lines: dict[str, Line]

    @property
    def line(self) -> Line:
        """Any of its lines; what they name is the same."""
        return next(iter(self.lines.values()))

    @property
    def cards(self) -> list[Card]:
        """Of its run, one per seed; empty where it is only published."""
        return self.line.cards

    @property
    def dataset(self) -> str:
        """As printed, else as its run says."""
        said = (self.cards[0].results or {}).get("dataset") if self.cards else None
        return str(self.line.published.dataset or said or UNSAID)

    @property
    def backbone(self) -> str:
        """As printed."""
        return self.line.published.backbone or UNSAID

    def measured(self, direction: str) -> float | None:
        """Return R@1 as measured in a direction; None without."""
        found = self.lines[direction].measured("R@1") if direction in self.lines else None
        return None if found is None else found.mean

    def published(self, direction: str) -> float | None:
        """Return R@1 as printed in a direction; None without."""
        cell = self.lines[direction].cells.get("R@1") if direction in self.lines else None
        return None if cell is None else cell.published


def leaderboard(views: Sequence[TableView]) -> list[Entry]:
    """Return what the tables measured and print of R@1, the best measured text-to-video R@1 first.

    A run that stands for lines of several tables is there once, beside the first print of its number. Question
    answering ranks nothing and is left out.

    Args:
        views: the tables.
    """
    found: dict[object, Entry] = {}
    for view in views:
        pairs: dict[object, dict[str, Line]] = {}
        for line in [*view.lines, *view.unprinted]:
            if line.published.direction in DIRECTIONS:
                pairs.setdefault(line.published.entry, {})[line.published.direction] = line
        for lines in pairs.values():
            entry = Entry(view, lines)
            printed = [entry.published(direction) for direction in DIRECTIONS]
            measured = [entry.measured(direction) for direction in DIRECTIONS]
            if not any(value is not None for value in printed + measured):
                continue
            own = entry.line.keys or (entry.line.published.method, entry.dataset, entry.backbone, *printed)
            known = found.setdefault(own, entry)
            if all(known.published(direction) is None for direction in DIRECTIONS):
                known.view = view
            # A table of one direction does not hide what another one prints of the other.
            known.lines.update({name: line for name, line in lines.items() if known.published(name) is None})
    return sorted(found.values(), key=_place)


def _place(entry: Entry) -> tuple[bool, float, float]:
    measured, printed = entry.measured("t2v"), entry.published("t2v")
    return measured is None, -(measured or 0.0), -(printed or 0.0)
