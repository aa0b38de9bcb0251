"""Published results: one row per method, dataset, and direction, as printed, with nothing inferred.

`published.json` contains `rows` with the fields of `PublishedRow`; null is not published. `note` states inconsistencies
and how the row was read, `source_line` its line in the paper's text. A sixth "paper", `zero-shot`, collects the
published results of untrained pretrained encoders, with sources in its notes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tvr_lightning.errors import UserError

Entry = tuple[str | None, ...]
NOISE, NOISE_DATASETS = 3.1, ("MSR-VTT", "DiDeMo")  # benchmarks/results/real-scores.md, on 1,000 pairs each
CLOSE = (
    f"~: less than {NOISE} points of R@1 below the best row with this backbone; {NOISE} is the smallest half-width of "
    "the 95 % interval of a difference between real systems on 1,000 pairs."
)
PRINTED = {  # columns of values and their fields; the accuracy is in `extra`
    "R@1": "recall_1", "R@5": "recall_5", "R@10": "recall_10", "R@50": "recall_50", "MdR": "median_rank",
    "MnR": "mean_rank", "RSum": "recall_sum", "SumR": "sum_of_recalls", "accuracy": "accuracy",
}  # fmt: skip
# Fields that only the other direction of a row shares.
IDENTITY = ("paper", "table", "dataset", "split", "backbone", "method", "variant", "post_process")
COLUMNS = ["paper", "table", "dataset", "backbone", "variant", "direction"]  # printed unless all rows share the value


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

    def printed(self, name: str) -> float | None:
        """Return a published value by the name of its column, or None."""
        return {**self.extra, **vars(self)}.get(PRINTED[name])

    @property
    def entry(self) -> Entry:
        """Identity of the row, which only its other direction shares."""
        return tuple(getattr(self, name) for name in IDENTITY)

    @property
    def full_method(self) -> str:
        """The method and its variant."""
        return f"{self.method}, {self.variant}" if self.variant else self.method

    def unprinted(self, shows: str) -> PublishedRow:
        """Return a row without values for an additional run, whose description is added to the variant."""
        own: dict[str, Any] = {name: getattr(self, name) for name in (*IDENTITY, "direction")}
        return PublishedRow(**own | {"variant": f"{self.variant}, {shows}" if self.variant else shows})


def printed_figure(value: float) -> str:
    """Return a published value with one decimal, or two if the paper has two."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def close_to_best(rows: Sequence[PublishedRow]) -> list[bool]:
    """Return whether each row is less than NOISE below the best R@1 of its dataset, backbone, and direction."""
    best: dict[tuple[str | None, ...], float] = {}
    keys = [(row.dataset, row.backbone, row.direction) for row in rows]
    recalls = [(row.recall_1 or 0.0) if row.dataset in NOISE_DATASETS else 0.0 for row in rows]
    for key, recall in zip(keys, recalls, strict=True):
        best[key] = max(recall, best.get(key, 0.0))
    return [0 < best[key] - recall < NOISE for key, recall in zip(keys, recalls, strict=True)]


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return all rows in the order of the papers."""
    text = files("tvr_lightning.reproduce").joinpath("published.json").read_text(encoding="utf-8")
    return tuple(PublishedRow(**row) for row in json.loads(text)["rows"])


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
        if value is not None:
            own = [((getattr(row, name) or "").lower(), row) for row in rows]
            known = sorted({getattr(row, name) for row in rows} - {None})
            rows = [row for text, row in own if value.lower() == text or (name == "method" and value.lower() in text)]
            if not rows:
                raise UserError(f"No published row has {name} {value!r}. Available: {', '.join(known) or 'none'}.")
    return rows


def print_published(rows: Sequence[PublishedRow], format: Literal["table", "csv", "json"]) -> None:
    """Print published rows as a table for reading, or as CSV or JSON for other tools."""
    if format == "json":
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    if format == "csv":
        plain = [{**asdict(row), "extra": json.dumps(row.extra)} for row in rows]
        print(pd.DataFrame(plain, dtype=object).to_csv(index=False, lineterminator="\n"), end="")
        return
    # What all rows share is in the title, and their notes are numbered.
    notes = {note: number for number, note in enumerate(dict.fromkeys(row.note for row in rows if row.note), start=1)}
    cells = []
    for row in rows:
        values = {name: row.printed(name) for name in PRINTED} | {"ms": row.speed_ms}
        cells.append({
            "method": row.method + (f" [{notes[row.note]}]" if row.note else ""),
            **{name: getattr(row, name) for name in COLUMNS},
            **{name: None if value is None else printed_figure(value) for name, value in values.items()},
            "further": ", ".join(f"{name} {value}" for name, value in row.extra.items()) or None,
        })  # fmt: skip
    frame = pd.DataFrame(cells, dtype=object).dropna(axis="columns", how="all")
    close = close_to_best(rows)
    if any(close):
        frame.loc[close, "R@1"] += "~"
    shared = [name for name in COLUMNS if name in frame and frame[name].nunique(dropna=False) == 1]
    title = [f"{len(rows)} published rows", *(f"{name} {frame[name].iloc[0]}" for name in shared)]
    table = Table(title=escape(", ".join(title)), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    own = frame.drop(columns=shared).fillna("-")
    numeric: dict[str, Any] = {"justify": "right", "no_wrap": True, "min_width": 5}
    for name in map(str, own):
        words = [word for text in (name, *own[name]) for word in text.split()]
        table.add_column(name, **numeric if name in (*PRINTED, "ms") else {"min_width": max(map(len, words))})
    for line in own.to_numpy().tolist():
        table.add_row(*map(escape, line))
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).minimum)
    console.print(table, crop=False)  # the measured width is sometimes too small
    for text in ([CLOSE] if any(close) else []) + [f"[{number}] {note}" for note, number in notes.items()]:
        console.print(escape(text), highlight=False)
