"""`tvr published`: what the papers print, as a table on the terminal, CSV or JSON."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from typing import Literal

from rich.console import Console
from rich.table import Table

from tvr_lightning.reproduce.published import PRINTED, PublishedRow, printed_figure, select_published

IDENTITY = ("paper", "table", "dataset", "backbone", "variant", "direction")


def run_published(
    paper: str | None = None,
    table: str | None = None,
    dataset: str | None = None,
    method: str | None = None,
    direction: Literal["t2v", "v2t", "t2v+v2t"] | None = None,
    format: Literal["table", "csv", "json"] = "table",
) -> int:
    """Print the results that the papers publish; a dash marks unpublished values.

    Args:
        paper: name of the paper: gare, tc-mgc, ncl, dpdv, gaid, or zero-shot for pretrained encoders; all by default.
        table: number of the table in the paper, such as 1, 7a, S3 or Fig7.
        dataset: name of the dataset, such as MSR-VTT.
        method: part of the method's name, regardless of case, such as GARE.
        direction: retrieval direction: t2v, v2t, or t2v+v2t for sums over both.
        format: output format: a table for reading, or CSV or JSON for other tools.
    """
    rows = select_published(paper, table, dataset, method, direction)
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
    return 0


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
