"""Leaderboards: every run once, regardless of how many tables it is from, next to the published R@1 if data is real."""

import re
from collections.abc import Sequence

import pandas as pd

from tvr_lightning.reproduce.published import printed_figure
from tvr_lightning.reproduce.report.figures.any_method import DIRECTIONS as HEADINGS
from tvr_lightning.reproduce.report.sources import ReportedRun
from tvr_lightning.reproduce.report.table_view import DIRECTIONS, TableView, filled, is_synthetic, warnings_of
from tvr_lightning.reproduce.report.uncertainty import measure


def leaderboards(
    views: Sequence[TableView], runs: Sequence[ReportedRun]
) -> dict[str, tuple[pd.DataFrame, list[ReportedRun]]]:
    """Return for each dataset the measured runs as text, the highest text-to-video R@1 first, and those runs.

    Without tables, each run is a row, with columns of the options that differ between the runs.
    """
    found: dict[str, tuple[dict[str, str], dict[str, float], list[ReportedRun]]] = {}
    for view in views:
        for name, own in view.finished.items():
            rows = view.results[view.results["run"] == name]
            first = rows.iloc[0]
            method = re.sub(r" \(ours\)", "", first["name"], flags=re.IGNORECASE)  # of the paper's authors
            named = {"method": method, "data": first["dataset"], "backbone": first["backbone"]}
            words, published, _ = found.setdefault(first["cards"], (named, {}, own))
            if not published:  # of the first table that has any
                words["table"] = view.title
            printed = rows[rows["metric"] == "R@1"].set_index("direction")["published"].dropna()
            published.update({str(key): value for key, value in printed.items() if key not in published})
    for run in runs if not views else ():
        encoder = run.results["config"].get("model", {}).get("init_args", {}).get("encoder") or {}
        method = run.results["method"] if run.external else f"{run.results['method']}, {run.title}"
        words = {"method": method, "data": "", "table": ""}
        words["backbone"] = encoder.get("init_args", {}).get("architecture")
        found[run.key] = words, {}, [run]
    mixed = len({is_synthetic(run) for run in runs}) > 1
    boards: dict[str, list[tuple[float, dict[tuple[str, str], str], ReportedRun]]] = {}
    for words, published, own in found.values():
        if (best := measure(own, "text_to_video", "R@1")) is None:
            continue
        marks = [mark for mark in warnings_of(own) if mixed or mark != "synthetic"]
        row = {("method", ""): words["method"] + (f" [{', '.join(marks)}]" if marks else "")}
        for direction, heading in HEADINGS.items():
            recalls = {name: measure(own, DIRECTIONS[direction], name) for name in ("R@1", "R@5", "R@10")}
            row[heading, "R@1"] = str(recalls.pop("R@1") or "-")
            shown = direction in published and not is_synthetic(own[0])
            row[heading, "published"] = printed_figure(published[direction]) if shown else "-"
            row |= {(heading, name): f"{one.mean:.1f}" if one else "-" for name, one in recalls.items()}
        row |= {(name, ""): words[name] or "-" for name in ("backbone", "table")}
        boards.setdefault(words["data"] or own[0].dataset, []).append((best.mean, row, own[0]))
    tables = {}
    for dataset, entries in sorted(boards.items(), key=lambda board: -len(board[1])):
        entries.sort(key=lambda entry: -entry[0])
        table = pd.DataFrame({column: [row[column] for _, row, _ in entries] for column in entries[0][1]})
        if not views:
            settings = pd.DataFrame([run.settings() for *_, run in entries])
            for name in settings.columns[settings.nunique() > 1]:  # NaN, of options that a method lacks, does not count
                if not name.endswith("class_path") and not settings[name].str.startswith("[").eq(True).any():
                    short = name.rpartition(".")[2], ""
                    table[(name, "") if short in table else short] = settings[name].fillna("-")
        tables[dataset] = filled(table), [run for *_, run in entries]
    return tables
