"""Systems that ranked the same queries, such as external scores: a table of intervals and one of paired differences."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape

from tvr_lightning.evaluation.intervals import METRIC
from tvr_lightning.evaluation.statistics import holm
from tvr_lightning.reproduce.published import PRINTED, PublishedRow, close_to_best, printed_figure
from tvr_lightning.reproduce.report.sources import ReportedRun, compare_runs, measure, read_ranks
from tvr_lightning.reproduce.report.table_view import (
    COLUMNS,
    DIRECTIONS,
    PAIRED,
    TEXTS,
    TableView,
    legend_of,
    notes_of_run,
    resolution,
    warnings_of,
)
from tvr_lightning.reproduce.tables import load_table

BOTH = "t2v+v2t"
PAIR = ["system", "compared with", "direction", "metric"]


def view_systems(runs: Sequence[ReportedRun], recipes: Path) -> list[TableView]:
    """Return a table for each group of runs that ranked the same queries and do not stand for published rows."""
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if not run.claims and run.finished and run.ranks.is_file() and "text_to_video" in run.results:
            groups.setdefault(run.data, []).append(run)
    views: dict[str, TableView] = {}
    for own in groups.values():
        name = re.sub(r"[^\w.-]+", "-", own[0].dataset.lower())
        name = f"{name}-{len(views)}" if name in views else name
        views[name] = _view(name, own, recipes)
    return [*views.values()]


def _view(name: str, runs: Sequence[ReportedRun], recipes: Path) -> TableView:
    methods = [run.results["method"] for run in runs]
    systems = {run.title if methods.count(each) > 1 else each: [run] for each, run in zip(methods, runs, strict=True)}
    first = runs[0].results
    count = f"{first['texts']:,} texts and {first['videos']:,} videos"
    if first["texts"] == first["videos"]:
        count = f"{first['texts']:,} pairs"
    protocol = min((run.results["protocol"] for run in runs), key=len)  # others add their training set
    trained = {run.results.get("trained_on") for run in runs}
    title = f"{runs[0].dataset} {first['split']}, {protocol}: {count}" + ("" if any(trained) else "; training unknown")
    view = TableView(name, title, "", pd.DataFrame(), systems, [], [])
    tables = {table for run in runs for table in run.results["config"].get("published") or ()}
    published = published_next_to(runs[0].dataset, tables, recipes)
    view.results = pd.DataFrame(_records(view, published), columns=["line", "name", *COLUMNS, *TEXTS])
    view.differences = pd.DataFrame(_differences(systems, view.results))
    of_runs = (f"{system}{sentence}" for system, (run,) in systems.items() for sentence in notes_of_run(run))
    view.notes = list(dict.fromkeys(filter(None, [*of_runs, legend_of(runs)])))
    view.statistics = [*resolution(view.results, systems)]
    return view


def published_next_to(dataset: str, tables: set[str], recipes: Path) -> list[PublishedRow]:
    """Return the rows of published tables on a dataset, or all rows if no paper has a dataset of this name."""
    rows = [row for table in sorted(tables) for row in load_table(table, recipes).rows]
    named = [row for row in rows if row.dataset == dataset]
    return named or rows


def _records(view: TableView, published: Sequence[PublishedRow]) -> Iterator[dict[str, Any]]:
    """Yield the results of every system, published row, direction, and metric."""
    line = 0
    for name, direction in DIRECTIONS.items():
        metrics: dict[str, None] = {}
        for system, runs in view.runs.items():
            common = {
                "line": line, "title": view.title, "name": system, "method": system, "dataset": runs[0].dataset,
                "direction": name, "run": system, "cards": f"{runs[0].key}.json",
                "warnings": ", ".join(warnings_of(runs)),
            }  # fmt: skip
            own = [metric for metric in runs[0].results[direction] if METRIC.fullmatch(metric)]
            metrics |= dict.fromkeys([*own, "SumR"])
            for metric in [*own, "SumR"]:
                if (found := measure(runs, direction, metric)) is not None:
                    yield {**common, "metric": metric, **found.cell()}
            ties = 100 * float((read_ranks(runs[0], direction)[0].tied > 1).double().mean())
            yield {**common, "metric": "tied matches %", "measured": ties, "text": f"{ties:.1f}"}
            line += 1
        for row, close in zip(published, close_to_best(published), strict=True):
            if row.direction == name:
                common = {
                    "line": line, "title": view.title, "name": f"{row.full_method}, published by {row.paper}",
                    "method": row.method, "variant": row.variant, "dataset": row.dataset, "backbone": row.backbone,
                    "direction": name, "warnings": "", "remarks": row.note or "",
                }  # fmt: skip
                for metric in metrics:
                    if metric in PRINTED and (value := row.printed(metric)) is not None:
                        text = printed_figure(value) + ("~" if close and metric == "R@1" else "")
                        yield {**common, "metric": metric, "published": value, "published_text": text}
                line += 1


def _differences(systems: Mapping[str, Sequence[ReportedRun]], results: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the difference of each two systems in each direction and metric, the better R@1 in text-to-video first."""
    best = results[(results["metric"] == "R@1") & (results["direction"] == "t2v")].set_index("run")["measured"]
    ranked = sorted(systems, key=lambda name: -best.get(name, math.nan))
    measured = results.dropna(subset=["measured"])[["direction", "metric"]].drop_duplicates()
    for direction, metric in measured.itertuples(index=False):
        if not METRIC.fullmatch(metric) or (metric == "SumR" and direction != "t2v"):
            continue
        found = {
            pair: comparison
            for pair in combinations(ranked, 2)
            if (comparison := compare_runs(systems[pair[1]], systems[pair[0]], DIRECTIONS[direction], metric))
        }
        corrected = holm([comparison.p_value for comparison in found.values()])
        for (pair, comparison), p in zip(found.items(), corrected, strict=True):
            d = comparison.difference
            yield {
                **dict(zip(PAIR, [*pair, BOTH if metric == "SumR" else direction, metric], strict=True)),
                "difference": d.estimate, "low": d.low, "high": d.high, "p": comparison.p_value, "p_holm": p,
                "power_80": comparison.detectable,
                "resolved": p < 0.05,
            }  # fmt: skip


def print_differences(view: TableView) -> None:
    """Print the differences of systems in R@1 and SumR, and what the test set resolves."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(escape(view.title))
    for system, other, direction, metric, difference, p, power, result in view.difference_table().to_numpy().tolist():
        shown = f"{direction} {metric}: {difference}, p {p} (Holm), {result}; 80 % power: {power}"
        console.print(escape(f"{system} against {other}, {shown}"))
    for sentence in (PAIRED, *view.statistics):
        console.print(escape(sentence))
