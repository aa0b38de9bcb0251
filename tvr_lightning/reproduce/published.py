"""What the papers print in their tables, as data: one row per method, dataset and direction, nothing inferred.

`published.json` holds `rows`, transcribed from the papers' text. Every row has the fields of `PublishedRow` under the
papers' own column names ("R@1" is `recall_1`); null is what the paper does not print. `note` says where the print is
inconsistent or how it was read, `source_line` is the line of the paper's text that the row was read from. A sixth
"paper", `zero-shot`, gathers what pretrained encoders are published to reach untrained; its notes name the sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from tvr_lightning.errors import UserError

PaperName = Literal["gare", "tc-mgc", "ncl", "dpdv", "gaid", "zero-shot"]
Printed = Literal["R@1", "R@5", "R@10", "R@50", "MdR", "MnR", "RSum", "SumR", "accuracy"]
Entry = tuple[str | None, ...]
PRINTED: tuple[Printed, ...] = ("R@1", "R@5", "R@10", "R@50", "MdR", "MnR", "RSum", "SumR", "accuracy")

_COLUMNS = {"recall_1": "R@1", "recall_5": "R@5", "recall_10": "R@10", "recall_50": "R@50", "median_rank": "MdR",
            "mean_rank": "MnR", "recall_sum": "RSum", "sum_of_recalls": "SumR"}  # fmt: skip
_BIBLIOGRAPHY_KEY = re.compile(r"([a-z]+)\d{4}\w* (.+?) ?(\d\d)")
"""First author, year and title, run together, before the venue; every paper cited so has several authors."""
_VENUE = re.compile(r"(.+)['\u2019](\d\d)")
_ROUNDING = 0.05  # half of the last printed digit, of every term and of the sum


class PublishedError(UserError, ValueError):
    """No published row answers to what was asked; the message says what there is."""


@dataclass(frozen=True)
class PublishedRow:
    """One printed row of a table, in one direction.

    Attributes:
        paper, table: where it is printed, such as "GARE" and "1"; figures are "Fig7".
        dataset, split, backbone: as the paper names them; None where the table does not say.
        direction: `t2v`, `v2t`, `t2v+v2t` for sums of both, or None where the row has no direction.
        method, variant: as printed; `variant` holds the setting of an ablation, the venue, or verbatim text.
        recall_1, recall_5, recall_10, recall_50: R@K in percent.
        median_rank, mean_rank: MdR and MnR, from 1.
        recall_sum: RSum of the direction. sum_of_recalls: SumR of both.
        speed_ms: milliseconds, as the paper defines them.
        post_process: post-processing of the scores that the paper names.
        extra: further printed columns.
        note: what a reader must know about the print.
        source_line: line of the paper's text.
    """

    paper: str
    table: str
    dataset: str | None
    split: str | None
    backbone: str | None
    direction: str | None
    method: str
    variant: str | None
    recall_1: float | None
    recall_5: float | None
    recall_10: float | None
    recall_50: float | None
    median_rank: float | None
    mean_rank: float | None
    recall_sum: float | None
    sum_of_recalls: float | None
    speed_ms: float | None
    post_process: str | None
    extra: Mapping[str, Any]
    note: str | None
    source_line: int | None

    def printed(self, name: Printed) -> float | None:
        """Return a figure under the name of its column; None where the paper does not print it."""
        if name == "accuracy":  # of the one table of question answering
            accuracy: float | None = self.extra.get("accuracy")
            return accuracy
        attribute = next(attribute for attribute, column in _COLUMNS.items() if column == name)
        value: float | None = getattr(self, attribute)
        return value

    @property
    def entry(self) -> Entry:
        """What the printed line is, whichever direction: both directions of a line share it, and no other row does."""
        return (
            self.paper, self.table, self.dataset, self.split, self.backbone, self.method, self.variant,
            self.post_process,
        )  # fmt: skip

    @property
    def full_method(self) -> str:
        """The method with what it is a variant of or in, citations in words."""
        return f"{self.method}, {cited(self.variant)}" if self.variant else self.method

    @property
    def place(self) -> str:
        """Where the row is printed: paper, table, line of the paper's text, and direction, which share a line."""
        return " ".join(str(part) for part in (self.paper, self.table, self.source_line, self.direction))

    def remarks(self) -> list[str]:
        """Return the note of the transcription and where the print disagrees with its own sums."""
        return [*([self.note] if self.note else []), *disagreements(self)]


def cited(variant: str) -> str:
    """Return a variant as printed, a citation among them in words: `Luo et al., Neurocomputing 22`, or `CVPR 21`.

    Args:
        variant: such as `luo2022clip4clip Neurocomputing22`, `CVPR'21`, or a setting, which stays as it is.
    """
    if key := _BIBLIOGRAPHY_KEY.fullmatch(variant):
        return f"{key[1].title()} et al., {key[2]} {key[3]}"
    if venue := _VENUE.fullmatch(variant):
        return f"{venue[1]} {venue[2]}"
    return variant


def printed_figure(value: float) -> str:
    """Return a printed figure with the digits of the print: one decimal, or two where the paper has two.

    Args:
        value: as transcribed.
    """
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def disagreements(row: PublishedRow) -> list[str]:
    """Say where a printed RSum or SumR is not the sum of the printed recalls, further than rounding explains.

    Args:
        row: one direction; for SumR the other direction of its line is looked up.

    Returns:
        One sentence for each sum that does not fit.
    """
    lines, own = [], _recalls(row)
    if row.recall_sum is not None and own and not _fits(row.recall_sum, own):
        lines.append(f"the paper prints RSum {row.recall_sum:.1f}, but its recalls add up to {sum(own):.1f}")
    both = [value for line in _directions().get(row.entry, []) for value in _recalls(line)]
    if row.sum_of_recalls is not None and len(both) == 6 and not _fits(row.sum_of_recalls, both):
        lines.append(f"the paper prints SumR {row.sum_of_recalls:.1f}, but its recalls add up to {sum(both):.1f}")
    return lines


def _recalls(row: PublishedRow) -> list[float]:
    """R@1, R@5 and R@10 where all three are printed."""
    recalls = [value for value in (row.recall_1, row.recall_5, row.recall_10) if value is not None]
    return recalls if len(recalls) == 3 else []


def _fits(printed: float, terms: list[float]) -> bool:
    return abs(sum(terms) - printed) <= _ROUNDING * (len(terms) + 1) + 1e-6


@cache
def _directions() -> dict[Entry, list[PublishedRow]]:
    lines: dict[Entry, list[PublishedRow]] = {}
    for row in published_rows():
        lines.setdefault(row.entry, []).append(row)
    return lines


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return every transcribed row, in the order of the papers.

    Raises:
        PublishedError: the resource lacks a field or has one that nobody reads.
    """
    text = files("tvr_lightning.reproduce").joinpath("published.json").read_text(encoding="utf-8")
    return tuple(_row(i, raw) for i, raw in enumerate(json.loads(text)["rows"]))


def _row(place: int, raw: dict[str, Any]) -> PublishedRow:
    names = [field.name for field in fields(PublishedRow)]
    columns = {_COLUMNS.get(name, name) for name in names}
    if set(raw) != columns:
        wrong = ", ".join(sorted(set(raw) ^ columns))
        raise PublishedError(f"published.json, row {place}: missing or unknown fields {wrong}")
    return PublishedRow(**{name: raw[_COLUMNS.get(name, name)] for name in names})


def select_published(
    paper: str | None = None,
    table: str | None = None,
    dataset: str | None = None,
    method: str | None = None,
    direction: str | None = None,
) -> list[PublishedRow]:
    """Return the rows that match every given value, regardless of case.

    Args:
        paper: such as "gare" or "tc-mgc".
        table: as the paper numbers it, such as "1", "7a", "S3", "Fig7".
        dataset: such as "MSR-VTT".
        method: part of the published name; "GARE" also selects "GARE (Ours)".
        direction: `t2v`, `v2t` or `t2v+v2t`.

    Raises:
        PublishedError: no row matches; the message lists the values there are.
    """
    wanted = {"paper": paper, "table": table, "dataset": dataset, "method": method, "direction": direction}
    rows = list(published_rows())
    for name, value in wanted.items():
        if value is None:
            continue
        found = [(row, (getattr(row, name) or "").lower()) for row in rows]
        kept = [row for row, own in found if (value.lower() in own if name == "method" else value.lower() == own)]
        if not kept:
            known = sorted({getattr(row, name) for row in rows if getattr(row, name) is not None})
            raise PublishedError(f"No published row has {name} {value!r}. Available: {', '.join(known) or 'none'}.")
        rows = kept
    return rows


def is_published(paper: str, table: str) -> bool:
    """Whether any row of a table or figure is transcribed; most figures print no numbers."""
    return any((row.paper.lower(), row.table.lower()) == (paper.lower(), table.lower()) for row in published_rows())


def unprinted_entry(paper: str, table: str, shows: str) -> Entry:
    """Return the line of what a paper shows without printing its numbers.

    Args:
        paper, table: as in the published numbers.
        shows: what it is.
    """
    name = next((row.paper for row in published_rows() if row.paper.lower() == paper.lower()), paper)
    return (name, table, None, None, None, name, shows, None)


def unprinted_row(entry: Entry, direction: str) -> PublishedRow:
    """Return the row of such a line, in which every figure is missing.

    Args:
        entry: as `unprinted_entry` gives it.
        direction: `t2v` or `v2t`.
    """
    paper, table, dataset, split, backbone, method, variant, post_process = entry
    missing: dict[str, Any] = dict.fromkeys((*_COLUMNS, "speed_ms", "note", "source_line"))
    return PublishedRow(
        paper=paper or "",
        table=table or "",
        dataset=dataset,
        split=split,
        backbone=backbone,
        direction=direction,
        method=method or "",
        variant=variant,
        post_process=post_process,
        extra={},
        **missing,
    )
