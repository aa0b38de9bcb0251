"""Leaderboards: every run once, whichever tables it is from, next to the published R@1."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from tvr_lightning.reproduce.published import printed_figure
from tvr_lightning.reproduce.report.sources import ReportedRun
from tvr_lightning.reproduce.report.table_view import DIRECTIONS, TableView, is_synthetic, warnings_of
from tvr_lightning.reproduce.report.uncertainty import measure

Row = dict[tuple[str, str], str]
HEADINGS = {"t2v": "text to video", "v2t": "video to text"}


def leaderboards(
    views: Sequence[TableView], runs: Sequence[ReportedRun]
) -> dict[str, tuple[pd.DataFrame, list[ReportedRun]]]:
    """Return for each dataset the measured runs as text, the highest text-to-video R@1 first, and those runs.

    Args:
        views: Tables.
        runs: All runs; without tables, each is a row.
    """
    found: dict[str, tuple[dict[str, str], dict[str, float], list[ReportedRun]]] = {}
    for view in views:
        for name, own in view.finished.items():
            rows = view.results[view.results["run"] == name]
            printed = rows[rows["metric"] == "R@1"].set_index("direction")["published"].dropna().to_dict()
            first = rows.iloc[0]
            words = {
                "method": first["name"],
                "data": first["dataset"],
                "backbone": first["backbone"],
                "table": view.title,
            }
            known = found.setdefault(first["cards"], (words, {}, own))
            if not known[1]:
                known[0]["table"] = view.title
            known[1].update({str(key): value for key, value in printed.items() if key not in known[1]})
    if not views:
        found = {run.key: (_words(run), {}, [run]) for run in runs}
    mixed = len({is_synthetic(run) for run in runs}) > 1
    boards: dict[str, list[tuple[float, Row, ReportedRun]]] = {}
    for words, published, own in found.values():
        if (best := measure(own, "text_to_video", "R@1")) is not None:
            row = _row(words, published, own, mixed)
            boards.setdefault(words["data"] or own[0].dataset, []).append((best.mean, row, own[0]))
    ordered = sorted(boards.items(), key=lambda board: -len(board[1]))
    return {dataset: _board(sorted(entries, key=lambda entry: -entry[0])) for dataset, entries in ordered}


def _board(entries: list[tuple[float, Row, ReportedRun]]) -> tuple[pd.DataFrame, list[ReportedRun]]:
    columns = pd.MultiIndex.from_tuples(list(entries[0][1]))
    table = pd.DataFrame([list(row.values()) for _, row, _ in entries], columns=columns)
    return table.loc[:, (table != "-").any()], [run for *_, run in entries]


def _words(run: ReportedRun) -> dict[str, str]:
    encoder = run.results["config"].get("model", {}).get("init_args", {}).get("encoder") or {}
    backbone = encoder.get("init_args", {}).get("architecture")
    return {"method": f"{run.results['method']}, {run.title}", "data": "", "backbone": backbone, "table": ""}


def _row(words: dict[str, str], published: dict[str, float], own: Sequence[ReportedRun], mixed: bool) -> Row:
    marks = [mark for mark in warnings_of(own) if mixed or mark != "synthetic"]
    cells = {("method", ""): words["method"] + (f" [{', '.join(marks)}]" if marks else "")}
    for direction, heading in HEADINGS.items():
        found = {metric: measure(own, DIRECTIONS[direction], metric) for metric in ("R@1", "R@5", "R@10")}
        cells[heading, "R@1"] = str(found["R@1"] or "-")
        cells[heading, "published"] = printed_figure(published[direction]) if direction in published else "-"
        cells |= {
            (heading, metric): f"{one.mean:.1f}" if one else "-" for metric, one in found.items() if metric != "R@1"
        }
    return cells | {(name, ""): words[name] or "-" for name in ("backbone", "table")}
