"""Published results as a table on the terminal, CSV, or JSON."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from typing import Literal

from rich.console import Console
from rich.table import Table

from tvr_lightning.reproduce.published import PRINTED, PublishedRow, printed_figure

IDENTITY = ("paper", "table", "dataset", "backbone", "variant", "direction")


def print_published(rows: list[PublishedRow], format: Literal["table", "csv", "json"]) -> None:
    """Print published rows as a table for reading, or as CSV or JSON for other tools."""
    if format == "json":
        plain = [{**asdict(row), "remarks": row.remarks()} for row in rows]
        print(json.dumps(plain, indent=2, ensure_ascii=False))
    elif format == "csv":
        writer = csv.DictWriter(sys.stdout, fieldnames=[*asdict(rows[0]), "remarks"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({**asdict(row), "extra": json.dumps(row.extra), "remarks": "; ".join(row.remarks())})
    else:
        _print_table(rows)


def _print_table(rows: list[PublishedRow]) -> None:
    columns = [name for name in PRINTED if any(row.printed(name) is not None for row in rows)]
    speed, extra = any(row.speed_ms is not None for row in rows), any(row.extra for row in rows)
    # What all rows share stands above them, so that figures keep their room in a narrow terminal.
    shared = [name for name in IDENTITY if len({getattr(row, name) for row in rows}) == 1]
    said = [f"{name} {getattr(rows[0], name)}" for name in shared if getattr(rows[0], name) is not None]
    table = Table(title=_literal(", ".join([f"{len(rows)} published rows", *said])))
    table.add_column("method", overflow="fold")
    own = [name for name in IDENTITY if name not in shared]
    for name in own:
        table.add_column(name, overflow="fold")
    for name in [*columns, *(["ms"] if speed else [])]:
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    if extra:
        table.add_column("further")
    notes: dict[str, int] = {}
    for row in rows:
        marks = "".join(f" [{notes.setdefault(text, len(notes) + 1)}]" for text in row.remarks())
        cells = [row.method + marks, *(getattr(row, name) for name in own)]
        cells += [_figure(row.printed(name)) for name in columns]
        cells += [_figure(row.speed_ms)] if speed else []
        cells += [", ".join(f"{key} {value}" for key, value in row.extra.items())] if extra else []
        table.add_row(*[_literal("-" if cell is None else cell) for cell in cells])
    console = Console()
    console.print(table)
    for text, number in notes.items():
        console.print(_literal(f"[{number}] {text}"), highlight=False)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if value >= 1000 else printed_figure(value)


def _literal(text: str) -> str:
    return text.replace("[", r"\[")
