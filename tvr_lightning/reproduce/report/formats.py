"""Tables as markdown, CSV and LaTeX; every measured number comes from a card, which the CSV names."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from tvr_lightning.files import write_whole
from tvr_lightning.reproduce.report.cells import NAMES, TableView, field_of, one_line, run_fields

MISSING = "-"
MEASURED = "Here: measured, with the 95 % bootstrap interval over queries in brackets, and ± the deviation over seeds."
DIFFERENCE = " Difference: measured minus published, with the measured interval; the papers publish none."

_RUN_COLUMNS = (
    "seed", "state", "protocol", "weights selected on", "post-processing", "precision", "steps", "epochs", "seconds",
    "peak memory, MiB", "data", "weights", "code",
)  # fmt: skip
_CELL_COLUMNS = {
    "published": "published",
    "measured": "measured.mean",
    "low": "measured.interval.low",
    "high": "measured.interval.high",
    "deviation": "measured.deviation",
    "seeds": "measured.seeds",
    "difference": "difference.mean",
    "against_baseline": "against_baseline.difference.estimate",
    "against_baseline_low": "against_baseline.difference.low",
    "against_baseline_high": "against_baseline.difference.high",
    "against_baseline_p": "against_baseline.p_value",
}
"""Columns of the CSV, and the field of a cell that each holds."""


def write_tables(views: Sequence[TableView], path: Path) -> list[Path]:
    """Write tables as markdown, CSV and LaTeX; return the files.

    Args:
        views: the tables.
        path: of the files, to which their endings are added.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, made in ((".md", markdown), (".csv", comma_separated), (".tex", latex)):
        written.append(path.with_name(path.name + suffix))
        write_whole(written[-1], made(*views).encode())
    return written


def markdown(*views: TableView) -> str:
    """Return tables, their statistics and notes, and what stands behind every run, as markdown."""
    return "\n".join(_markdown(view) for view in views)


def _markdown(view: TableView) -> str:
    parts = [f"## {view.title}", _markdown_table(_head(view), _rows(view))]
    parts.append(MEASURED + (DIFFERENCE if view.comparable else "") + (f" {view.legend}" if view.legend else ""))
    for title, lines in (("Statistics", view.statistics), ("Notes", view.notes)):
        if lines:
            parts.append(f"### {title}\n\n" + "\n".join(f"- {one_line(line)}" for line in lines))
    behind = _run_rows(view)
    if behind:
        parts.append("### Runs\n\n" + _markdown_table(["run", *_RUN_COLUMNS, "card"], behind))
    return "\n\n".join(parts) + "\n"


def latex(*views: TableView) -> str:
    """Return tables, their statistics and notes as LaTeX tables that need the package booktabs."""
    return "\n".join(_latex(view) for view in views)


def _latex(view: TableView) -> str:
    head, *body = (" & ".join(map(_tex, row)) + r" \\" for row in (_head(view), *_rows(view)))
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_tex(view.title)}}}",
            rf"\begin{{tabular}}{{{'l' * len(NAMES)}{'r' * len(view.columns)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *[
                rf"\par\footnotesize {_tex(one_line(line))}"
                for line in (view.legend, *view.statistics, *view.notes)
                if line
            ],
            r"\end{table}",
            "",
        ]
    )


def comma_separated(*views: TableView) -> str:
    """Return one row per printed line and metric, every figure in a column of its own, with the cards' names."""
    names = ("method", "variant", "dataset", "backbone", "direction")
    columns = ["title", *names, "metric", *_CELL_COLUMNS, "baseline", "run", "cards", "warnings", "remarks"]
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    for view in views:
        for line in view.lines:
            common = {name: getattr(line.published, name) for name in names}
            common |= {"title": view.title, "run": line.run, "baseline": line.baseline}
            common["cards"] = " ".join(f"{card.key}.json" for card in line.cards)
            common["warnings"] = ", ".join(line.warnings)
            common["remarks"] = "; ".join(line.published.remarks())
            for metric, cell in line.cells.items():
                if cell.published is None and cell.measured is None:
                    continue
                figures = {name: field_of(cell, path) for name, path in _CELL_COLUMNS.items()}
                known = {name: value for name, value in figures.items() if value == value}  # a median has no p-value
                writer.writerow({**common, "metric": metric, **known})
    return file.getvalue()


def _head(view: TableView) -> list[str]:
    words = {"published": "{} published", "measured": "here", "difference": "difference"}
    return [*NAMES, *(words[column].format(metric) for metric, column in view.columns)]


def _rows(view: TableView) -> list[list[str]]:
    return [
        [
            (line.names[0] or MISSING) + (f" [{', '.join(line.warnings)}]" if line.warnings else ""),
            *(name or MISSING for name in line.names[1:]),
            *(line.cells[metric].text(column) or MISSING for metric, column in view.columns),
        ]
        for line in view.lines
    ]


def _run_rows(view: TableView) -> list[list[str]]:
    rows = []
    for name, made in view.runs.items():
        for planned, card in made:
            found = run_fields(card or {"status": "not run", "run": planned.plain()})
            values = (found[words][1] if words in found else MISSING for words in _RUN_COLUMNS)
            cells = [f"{value:.0f}" if isinstance(value, float) else str(value) for value in values]
            rows.append([name, *cells, f"{planned.key}.json" if card else MISSING])
    return rows


def _markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(one_line(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def _tex(text: str) -> str:
    for raw, escaped in (("\\", r"\textbackslash "), ("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#"),
                         ("^", r"\^{}"), ("$", r"\$"), ("±", r"$\pm$")):  # fmt: skip
        text = text.replace(raw, escaped)
    return text
