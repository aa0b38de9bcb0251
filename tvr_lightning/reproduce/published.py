"""Published results as data: one row per method, dataset, and direction, as printed, with nothing inferred.

`published.json` contains `rows` with the fields of `PublishedRow`, metrics under the papers' column names; null is not
published. `note` states inconsistencies and how the row was read, `source_line` its line in the paper's text. A sixth
"paper", `zero-shot`, collects the published results of untrained pretrained encoders, with sources in its notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from tvr_lightning.errors import UserError

PaperName = Literal["gare", "tc-mgc", "ncl", "dpdv", "gaid", "zero-shot"]
Printed = Literal["R@1", "R@5", "R@10", "R@50", "MdR", "MnR", "RSum", "SumR", "accuracy"]
Entry = tuple[str | None, ...]
PRINTED: tuple[Printed, ...] = ("R@1", "R@5", "R@10", "R@50", "MdR", "MnR", "RSum", "SumR", "accuracy")

_ATTRIBUTES = {"R@1": "recall_1", "R@5": "recall_5", "R@10": "recall_10", "R@50": "recall_50", "MdR": "median_rank",
               "MnR": "mean_rank", "RSum": "recall_sum", "SumR": "sum_of_recalls"}  # fmt: skip
# First author, year, and title, run together, before the venue; every paper cited so has several authors.
_BIBLIOGRAPHY_KEY = re.compile(r"([a-z]+)\d{4}\w* (.+?) ?(\d\d)")
_VENUE = re.compile(r"(.+)['\u2019](\d\d)")


@dataclass(frozen=True)
class PublishedRow:
    """One published row of a table, in one direction."""

    paper: str
    table: str  # such as 1; Fig7 for a figure
    dataset: str | None
    split: str | None
    backbone: str | None
    direction: str | None  # t2v, v2t, t2v+v2t for sums of both, or None
    method: str
    variant: str | None  # setting of an ablation, venue, or verbatim text
    recall_1: float | None = None  # in percent, as all recalls
    recall_5: float | None = None
    recall_10: float | None = None
    recall_50: float | None = None
    median_rank: float | None = None
    mean_rank: float | None = None
    recall_sum: float | None = None  # of the direction
    sum_of_recalls: float | None = None  # of both directions
    speed_ms: float | None = None  # as the paper defines it
    post_process: str | None = None  # post-processing of the scores
    extra: Mapping[str, Any] = field(default_factory=dict)  # further columns
    note: str | None = None
    source_line: int | None = None

    def printed(self, name: Printed) -> float | None:
        """Return a published value by the name of its column, or None."""
        value: float | None = self.extra.get(name) if name == "accuracy" else getattr(self, _ATTRIBUTES[name])
        return value

    @property
    def entry(self) -> Entry:
        """Identity of the row, which only its other direction shares."""
        return (
            self.paper, self.table, self.dataset, self.split, self.backbone, self.method, self.variant,
            self.post_process,
        )  # fmt: skip

    @property
    def full_method(self) -> str:
        """The method and its variant, with citations in words."""
        return f"{self.method}, {cited(self.variant)}" if self.variant else self.method

    def remarks(self) -> list[str]:
        """Return the note, if there is one, as a list."""
        return [self.note] if self.note else []

    def unprinted(self, shows: str) -> PublishedRow:
        """Return a row without values for an additional run, whose description is added to the variant."""
        variant = shows if self.variant is None else f"{self.variant}, {shows}"
        return PublishedRow(
            self.paper, self.table, self.dataset, self.split, self.backbone, self.direction, self.method, variant,
            post_process=self.post_process,
        )  # fmt: skip


def cited(variant: str) -> str:
    """Return a variant with a citation in words: `Luo et al., Neurocomputing 22`, or `CVPR 21`."""
    if key := _BIBLIOGRAPHY_KEY.fullmatch(variant):
        return f"{key[1].title()} et al., {key[2]} {key[3]}"
    if venue := _VENUE.fullmatch(variant):
        return f"{venue[1]} {venue[2]}"
    return variant


def printed_figure(value: float) -> str:
    """Return a published value with one decimal, or two if the paper has two."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return all rows in the order of the papers."""
    text = files("tvr_lightning.reproduce").joinpath("published.json").read_text(encoding="utf-8")
    return tuple(
        PublishedRow(**{_ATTRIBUTES.get(name, name): value for name, value in row.items()})
        for row in json.loads(text)["rows"]
    )


def select_published(
    paper: str | None = None,
    table: str | None = None,
    dataset: str | None = None,
    method: str | None = None,
    direction: str | None = None,
) -> list[PublishedRow]:
    """Return the rows that match all given values, regardless of case; a part of the method's name is enough."""
    wanted = {"paper": paper, "table": table, "dataset": dataset, "method": method, "direction": direction}
    rows = list(published_rows())
    for name, value in wanted.items():
        if value is None:
            continue
        found = [(row, (getattr(row, name) or "").lower()) for row in rows]
        kept = [row for row, own in found if (value.lower() in own if name == "method" else value.lower() == own)]
        if not kept:
            known = sorted({getattr(row, name) for row in rows if getattr(row, name) is not None})
            raise UserError(f"No published row has {name} {value!r}. Available: {', '.join(known) or 'none'}.")
        rows = kept
    return rows
