"""Published results as a table on the terminal, CSV, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tvr_lightning.reproduce.published import PRINTED, PublishedRow, printed_figure

NAMES = ["paper", "table", "dataset", "backbone", "variant", "direction"]


def print_published(rows: Sequence[PublishedRow], format: Literal["table", "csv", "json"]) -> None:
    """Print published rows as a table for reading, or as CSV or JSON for other tools."""
    if format == "table":
        _print_table(rows)
    elif format == "json":
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
    else:
        plain = [{**asdict(row), "extra": json.dumps(row.extra)} for row in rows]
        print(pd.DataFrame(plain, dtype=object).to_csv(index=False, lineterminator="\n"), end="")


def _print_table(rows: Sequence[PublishedRow]) -> None:
    """Print rows with what all of them share in the title, and with numbered notes below them."""
    notes = {note: number for number, note in enumerate(dict.fromkeys(row.note for row in rows if row.note), start=1)}
    cells = []
    for row in rows:
        values = {name: row.printed(name) for name in PRINTED} | {"ms": row.speed_ms}
        cells.append({
            "method": row.method + (f" [{notes[row.note]}]" if row.note else ""),
            **{name: getattr(row, name) for name in NAMES},
            **{name: None if value is None else printed_figure(value) for name, value in values.items()},
            "further": ", ".join(f"{name} {value}" for name, value in row.extra.items()) or None,
        })  # fmt: skip
    frame = pd.DataFrame(cells, dtype=object).dropna(axis="columns", how="all")
    shared = [name for name in NAMES if name in frame and frame[name].nunique(dropna=False) == 1]
    title = [f"{len(rows)} published rows", *(f"{name} {frame[name].iloc[0]}" for name in shared)]
    table = Table(title=escape(", ".join(title)))
    own = frame.drop(columns=shared).fillna("-")
    for name in map(str, own):
        if name in (*PRINTED, "ms"):
            table.add_column(name, justify="right", no_wrap=True, min_width=5)
        else:
            table.add_column(name, overflow="fold")
    for line in own.to_numpy().tolist():
        table.add_row(*map(escape, line))
    console = Console()
    console.print(table)
    for note, number in notes.items():
        console.print(escape(f"[{number}] {note}"), highlight=False)
