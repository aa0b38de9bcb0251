"""Tables as markdown, CSV and LaTeX; every measured number comes from a card, which the CSV names."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from tvr_lightning.evaluation.statistics import Comparison
from tvr_lightning.reproduce.published import printed_figure
from tvr_lightning.reproduce.report.cells import Line, TableView
from tvr_lightning.reproduce.report.uncertainty import Measured
from tvr_lightning.reproduce.runs.card import Card

MISSING = "-"
RUN_COLUMNS = (
    "run", "seed", "state", "protocol", "select_on", "post-processing", "precision", "steps", "epochs", "seconds",
    "MiB", "data", "weights", "code", "card",
)  # fmt: skip


def write_table(view: TableView, folder: Path) -> list[Path]:
    """Write a table in all three formats; return the files.

    Args:
        view: the table.
        folder: where <name>.md, <name>.csv and <name>.tex go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix, text in ((".md", markdown(view)), (".csv", comma_separated(view)), (".tex", latex(view))):
        path = folder / f"{view.name}{suffix}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def markdown(view: TableView) -> str:
    """Return the table, its statistics and notes, and what stands behind every run, as markdown."""
    head, rows = _cells(view)
    parts = [f"## {view.title}", _markdown_table(head, rows)]
    parts.append(
        "Here: measured, with its 95 % bootstrap interval over queries in brackets, and ± the deviation over seeds."
        + (
            " Difference: measured minus published, with the measured interval; the print has none."
            if view.comparable
            else ""
        )
    )
    for title, lines in (("Statistics", view.statistics), ("Notes", view.notes)):
        if lines:
            parts.append(f"### {title}\n\n" + "\n".join(f"- {_one_line(line)}" for line in lines))
    behind = _run_rows(view)
    if behind:
        parts.append("### Runs\n\n" + _markdown_table(list(RUN_COLUMNS), behind))
    return "\n\n".join(parts) + "\n"


def latex(view: TableView) -> str:
    """Return the table, its statistics and notes as a LaTeX table that needs the package booktabs."""
    head, rows = _cells(view)
    body = [" & ".join(_tex(cell) for cell in row) + r" \\" for row in rows]
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_tex(view.title)}}}",
            rf"\begin{{tabular}}{{llll{'r' * (len(head) - 4)}}}",
            r"\toprule",
            " & ".join(_tex(cell) for cell in head) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *[rf"\par\footnotesize {_tex(_one_line(line))}" for line in (*view.statistics, *view.notes)],
            r"\end{table}",
            "",
        ]
    )


def comma_separated(view: TableView) -> str:
    """Return one row per printed line and metric, every figure in a column of its own, with the cards' names."""
    columns = [
        "title", "method", "variant", "dataset", "backbone", "direction", "metric", "published", "measured", "low",
        "high", "deviation", "seeds", "difference", "baseline", "against_baseline", "against_baseline_low",
        "against_baseline_high", "against_baseline_p", "run", "cards", "remarks",
    ]  # fmt: skip
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    for line in view.lines:
        row = line.published
        common = {name: getattr(row, name) or "" for name in ("method", "variant", "dataset", "backbone", "direction")}
        for metric in view.metrics:
            published, found = row.printed(metric), line.measured.get(metric)
            if published is None and found is None:
                continue
            writer.writerow(
                {
                    **common,
                    "title": view.title,
                    "metric": metric,
                    "published": "" if published is None else published,
                    **(_figures(view, found, published) if found else {}),
                    **_against(line.against_baseline.get(metric)),
                    "baseline": line.baseline or "",
                    "run": line.run or "",
                    "cards": " ".join(f"{card.key}.json" for card in line.cards),
                    "remarks": "; ".join(row.remarks()),
                }
            )
    return file.getvalue()


def _figures(view: TableView, found: Measured, published: float | None) -> dict[str, float | int | str]:
    interval = found.interval
    compare = view.comparable and published is not None
    return {
        "measured": found.mean,
        "low": interval.low if interval else "",
        "high": interval.high if interval else "",
        "deviation": "" if found.deviation is None else found.deviation,
        "seeds": found.seeds,
        "difference": found.mean - published if compare and published is not None else "",
    }


def _against(found: Comparison | None) -> dict[str, float | str]:
    """Columns of the difference from the baseline; a median has no p-value."""
    if found is None:
        return {}
    difference = found.difference
    return {
        "against_baseline": difference.estimate,
        "against_baseline_low": difference.low,
        "against_baseline_high": difference.high,
        "against_baseline_p": "" if math.isnan(found.p_value) else found.p_value,
    }


def _cells(view: TableView) -> tuple[list[str], list[list[str]]]:
    head = ["method", "data", "backbone", "direction"]
    for metric in view.metrics:
        head += [f"{metric} published", "here"] + (["difference"] if view.comparable and metric == "R@1" else [])
    return head, [_line(view, line) for line in view.lines]


def _line(view: TableView, line: Line) -> list[str]:
    row = line.published
    method = f"{row.method}, {row.variant}" if row.variant else row.method
    cells = [method, row.dataset or MISSING, row.backbone or MISSING, row.direction or MISSING]
    for metric in view.metrics:
        published, found = row.printed(metric), line.measured.get(metric)
        cells.append(MISSING if published is None else printed_figure(published))
        cells.append(_measured(found) if found else MISSING)
        if view.comparable and metric == "R@1":
            cells.append(_difference(found, published))
    return cells


def _measured(found: Measured) -> str:
    deviation = f" ± {found.deviation:.1f}" if found.deviation is not None else ""
    interval = f" [{found.interval.low:.1f}, {found.interval.high:.1f}]" if found.interval else ""
    return f"{found.mean:.1f}{deviation}{interval}"


def _difference(found: Measured | None, published: float | None) -> str:
    if found is None or published is None or found.interval is None:
        return MISSING
    low, high = found.interval.low - published, found.interval.high - published
    return f"{found.mean - published:+.1f} [{low:+.1f}, {high:+.1f}]"


def _run_rows(view: TableView) -> list[list[str]]:
    rows = []
    for name, made in view.runs.items():
        for planned, card in made:
            prints = planned.fingerprints
            rows.append(
                [
                    name,
                    *_card_cells(card, planned.seed),
                    prints["data"],
                    prints["weights"],
                    prints["code"],
                    f"{planned.key}.json" if card else MISSING,
                ]
            )
    return rows


def _card_cells(card: Card | None, seed: int | None) -> list[str]:
    if card is None or card.results is None:
        state = card.status if card else "not run"
        return [MISSING if seed is None else str(seed), state, *[MISSING] * 8]
    results = card.results
    return [
        str(results["seed"]),
        card.status,
        results["protocol"],
        results["select_on"] or results.get("weights", {}).get("kind", MISSING),
        results.get("post_processing") or "none",
        results["precision"],
        str(card.steps),
        str(card.epochs),
        f"{card.seconds:.0f}",
        MISSING if card.peak_memory_mib is None else f"{card.peak_memory_mib:.0f}",
    ]


def _markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_one_line(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def _one_line(text: str) -> str:
    return " / ".join(part.strip() for part in text.splitlines() if part.strip())


def _tex(text: str) -> str:
    for raw, escaped in (("\\", r"\textbackslash "), ("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("#", r"\#"),
                         ("^", r"\^{}"), ("$", r"\$"), ("±", r"$\pm$")):  # fmt: skip
        text = text.replace(raw, escaped)
    return text
