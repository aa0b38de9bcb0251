"""A published table next to what was measured for it, as one pandas table that every format is written from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.evaluation.statistics import effective_queries, recall_values
from tvr_lightning.files import write_whole
from tvr_lightning.reproduce.published import PRINTED, Printed, PublishedRow, printed_figure
from tvr_lightning.reproduce.report.sources import CardDirection, ReportedRun, TableRecipe, read_ranks
from tvr_lightning.reproduce.report.uncertainty import compare_runs, measure, smallest_difference

NOT_COMPARABLE = "SYNTHETIC FIXTURE: the measured numbers are not comparable with the published ones"
MEASURED = "Here: measured, with the 95 % bootstrap interval over queries in brackets, and ± the deviation over seeds."
DIFFERENCE = " Difference: measured minus published, with the measured interval; the papers publish none."
NOTE_LENGTH = 400
WARNINGS = {
    "leaks": "ground truth leaks into the scores",
    "not audited": "no leakage audit was completed",
    "overridden": "scored with other options than in training",
    "synthetic": "measured on synthetic data",
}
DIRECTIONS: dict[str, CardDirection] = {"t2v": "text_to_video", "v2t": "video_to_text"}
UNPRINTED: tuple[Printed, ...] = ("R@1", "R@5", "R@10", "MnR")
"""Metrics of figures, for which the papers print no numbers."""
NAMES = ["method", "data", "backbone", "direction"]
COLUMNS = [
    "title", "method", "variant", "dataset", "backbone", "direction", "metric", "published", "measured", "low", "high",
    "deviation", "seeds", "difference", "against_baseline", "against_baseline_low", "against_baseline_high",
    "against_baseline_p", "baseline", "run", "cards", "warnings", "remarks",
]  # fmt: skip
"""Columns of the CSV file."""
TEXTS = ["line", "name", "published_text", "text", "difference_text"]
"""Further columns of the results, from which the other formats are made."""
RUN_FIELDS = [
    "name", "results.seed", "status", "results.protocol", "results.select_on", "results.post_processing",
    "results.precision", "steps", "epochs", "seconds", "peak_memory_mib", "run.fingerprints.data",
    "run.fingerprints.weights", "run.fingerprints.code", "key",
]  # fmt: skip
"""Fields of a run card in the table of runs."""


@dataclass
class TableView:
    """A table that can be written in any format.

    Attributes:
        name: Name of the table's recipe.
        title: Paper and number.
        caution: Why measured results must not be compared with the published ones; empty if they can be.
        results: One row per published row and metric, with the columns COLUMNS and TEXTS.
        runs: Runs of the table by name, one per seed.
        statistics: Sentences about differences and resolution.
        notes: Sentences about the published rows, failed runs, warnings, and skipped files.
    """

    name: str
    title: str
    caution: str
    results: pd.DataFrame
    runs: Mapping[str, Sequence[ReportedRun]]
    statistics: list[str]
    notes: list[str]

    @property
    def finished(self) -> dict[str, list[ReportedRun]]:
        """Finished runs by name, without the names that have none."""
        return {name: own for name, runs in self.runs.items() if (own := [run for run in runs if run.finished])}

    def wide(self) -> pd.DataFrame:
        """Return the results as text: one row per published row, columns by metric, without empty columns."""
        columns = ["published_text", "text", "difference_text"]
        cells = self.results.pivot(index="line", columns="metric", values=columns).fillna("")
        names = self.results.drop_duplicates("line").set_index("line")
        table = {(name, ""): names["dataset" if name == "data" else name].fillna("-") for name in NAMES}
        # The title states once that a table is synthetic.
        marks = names["warnings"].str.removesuffix("synthetic").str.removesuffix(", ")
        table["method", ""] = names["name"] + marks.map(lambda shown: shown and f" [{shown}]")
        for metric in dict.fromkeys(self.results["metric"]):
            for column, heading in zip(columns, ("published", "here", "difference"), strict=True):
                if cells[column, metric].any() and (column != "difference_text" or metric == "R@1"):
                    table[metric, heading] = cells[column, metric].replace("", "-")
        return pd.DataFrame(table)

    def run_table(self) -> pd.DataFrame:
        """Return facts about each run as text, one row per seed."""
        cards = [asdict(run.card) for own in self.runs.values() for run in own]
        table = pd.json_normalize(cards).reindex(columns=RUN_FIELDS).astype(object)
        table.columns = pd.Index([field.rpartition(".")[2].replace("_", " ") for field in RUN_FIELDS])
        return table.map(lambda value: "-" if pd.isna(value) else str(value))


def view_table(table: TableRecipe, runs: Sequence[ReportedRun]) -> TableView:
    """Compare a table's runs with its published rows.

    Args:
        table: Table with its published rows.
        runs: Runs of any table; those that stand for rows of this one are used.
    """
    runs = sorted(runs, key=lambda run: run.seed or 0)
    made = {row.name: [run for run in runs if f"{table.name}/{row.name}" in run.claims] for row in table.runs}
    finished = {name: [run for run in own if run.finished] for name, own in made.items()}
    rows = table.published()
    shown = UNPRINTED if any(run.shows is not None for run in table.runs) else ()
    metrics = [name for name in PRINTED if name in shown or any(row.printed(name) is not None for row in rows)]
    number = table.table.replace("Fig", "Figure ") if table.table.startswith("Fig") else f"Table {table.table}"
    own_runs = [run for own in made.values() for run in own]
    overlays = [run.planned["overlay"]["path"] for run in own_runs if run.planned["overlay"] is not None]
    cautions = [NOT_COMPARABLE] if any(is_synthetic(run) for run in own_runs) else []
    cautions += [f"every run with the overlay {path}, not with the published settings" for path in overlays[:1]]
    run_of = {run.entry: run.name for run in table.runs}
    backbone_of = {run_of.get(row.entry): row.backbone for row in rows}
    records: list[dict[str, Any]] = []
    for line, row in enumerate(rows):
        name = run_of.get(row.entry)
        own = finished[name] if name is not None else []
        # Not every row states its backbone.
        baselines = {
            base: finished[base]
            for base in table.baselines
            if own and name not in table.baselines and len({backbone_of[base], row.backbone} - {None}) < 2
        }
        common = {
            "line": line, "title": f"{rows[0].paper}, {number}", "name": row.full_method, "method": row.method,
            "variant": row.variant, "dataset": row.dataset, "backbone": row.backbone, "direction": row.direction,
            "run": name, "cards": " ".join(f"{run.key}.json" for run in own), "warnings": ", ".join(warnings_of(own)),
            "remarks": "; ".join(row.remarks()),
        }  # fmt: skip
        records += [{**common, **_cell(row, own, metric, baselines, bool(cautions))} for metric in metrics]
    results = pd.DataFrame(records, columns=[*COLUMNS, *TEXTS])
    view = TableView(table.name, records[0]["title"], "; ".join(cautions), results, made, [], [])
    notes = (table.note, *_notes(rows, made), *_shared(own_runs), legend_of(own_runs))
    view.notes = [note for note in notes if note]
    view.statistics = [*_resolution(results, finished), *_differences(results)]
    return view


def is_synthetic(run: ReportedRun) -> bool:
    """Return whether a run used synthetic data."""
    return run.planned["fixture_videos"] is not None or SYNTHETIC in run.results.get("warnings", [])


def _cell(
    row: PublishedRow,
    own: Sequence[ReportedRun],
    metric: Printed,
    baselines: Mapping[str, Sequence[ReportedRun]],
    apart: bool,
) -> dict[str, Any]:
    """Return the columns of one metric of a row. Its baseline is the one that ranked the same queries."""
    published, direction = row.printed(metric), DIRECTIONS.get(row.direction or "", "text_to_video")
    cell: dict[str, Any] = {"metric": metric, "published": published}
    cell["published_text"] = "" if published is None else printed_figure(published)
    belongs = (
        metric != "accuracy" if row.direction in DIRECTIONS else metric == ("SumR" if row.direction else "accuracy")
    )
    found = measure(own, direction, metric) if belongs else None
    if found is None:
        return cell
    interval = asdict(found.interval) if found.interval else {"low": math.nan, "high": math.nan}
    cell |= {"measured": found.mean, "low": interval["low"], "high": interval["high"], "text": str(found),
             "deviation": found.deviation, "seeds": found.seeds}  # fmt: skip
    for name, base in baselines.items():
        if base and (compared := compare_runs(base, own, direction, metric)) is not None:
            d = compared.difference
            cell |= {"baseline": name, "against_baseline": d.estimate, "against_baseline_low": d.low,
                     "against_baseline_high": d.high, "against_baseline_p": compared.p_value}  # fmt: skip
    if published is not None and not apart:
        cell["difference"] = found.mean - published
        ends = f" [{interval['low'] - published:+.1f}, {interval['high'] - published:+.1f}]" if found.interval else ""
        cell["difference_text"] = f"{found.mean - published:+.1f}{ends}"
    return cell


def warnings_of(runs: Sequence[ReportedRun]) -> list[str]:
    """Return those of WARNINGS that apply to any of the runs."""
    found: set[str] = set()
    for run in (run for run in runs if run.finished):
        audit, warnings = run.results.get("audit"), run.results.get("warnings", [])
        holds = {
            "leaks": LEAKS in warnings or bool(audit and audit["leaks"]),
            "not audited": audit is None or audit["problem"] is not None,
            "overridden": bool(run.results.get("weights", {}).get("overridden")),
            "synthetic": SYNTHETIC in warnings,
        }
        found |= {mark for mark, applies in holds.items() if applies}
    return [mark for mark in WARNINGS if mark in found]


def legend_of(runs: Sequence[ReportedRun]) -> str:
    """Return the meaning of the warnings about runs as one sentence; empty without warnings."""
    meanings = [f"{mark}: {WARNINGS[mark]}" for mark in warnings_of(runs) if mark != "synthetic"]
    return f"Warnings: {'; '.join(meanings)}." if meanings else ""


def _resolution(results: pd.DataFrame, finished: Mapping[str, Sequence[ReportedRun]]) -> list[str]:
    """Return the smallest resolved difference at the best R@1 of each test set."""
    best: dict[tuple[str, str, int, int], tuple[float, float]] = {}
    measured = results[(results["metric"] == "R@1") & results["measured"].notna()]
    for row in measured.to_dict("records"):
        ranks, video = read_ranks(finished[row["run"]][0], DIRECTIONS[row["direction"]])
        key = row["direction"], row["dataset"] or "the test set", len(ranks), len(video.unique())
        worth = effective_queries(recall_values(1)(ranks), video)
        best[key] = max(best.get(key, (-1.0, worth)), (row["measured"], worth), key=lambda pair: pair[0])
    sentences = []
    for (direction, dataset, queries, videos), (recall, worth) in sorted(best.items()):
        of_videos = f" on {videos} videos (effectively {worth:.0f} unrelated ones)" if videos < queries else ""
        sentences.append(
            f"{dataset}, {direction}: {queries} queries{of_videos} resolve a difference of "
            f"{smallest_difference(recall, worth):.1f} points at R@1 {recall:.1f} (95 %, unrelated errors)"
        )
    return sentences


def _differences(results: pd.DataFrame) -> list[str]:
    rows = results[(results["metric"] == "R@1") & results["against_baseline"].notna()]
    sentences = []
    for row in rows.to_dict("records"):
        d, low, high, p = (row[f"against_baseline{name}"] for name in ("", "_low", "_high", "_p"))
        verdict = "resolved" if low > 0 or high < 0 else "not resolved"
        sentences.append(
            f"{row['run']} against {row['baseline']}, {row['direction']} R@1: {d:+.1f} [{low:+.1f}, {high:+.1f}] "
            f"points, p {p:.2g}, paired over queries, {verdict}"
        )
    return [*dict.fromkeys(sentences), *(["Differences in the other metrics are in the CSV file"] if sentences else [])]


def one_line(text: str) -> str:
    """Return a text with slashes instead of line breaks."""
    return " / ".join(part.strip() for part in text.splitlines() if part.strip())


def _notes(rows: Sequence[PublishedRow], made: Mapping[str, Sequence[ReportedRun]]) -> list[str]:
    notes = [
        f"Published, {', '.join(filter(None, (row.full_method, row.dataset, row.backbone, row.direction)))}: {remark}"
        for row in rows
        for remark in row.remarks()
    ]
    sets: dict[str, dict[str, list[str]]] = {}
    for name, runs in made.items():
        for run in runs:
            notes += [f"Run {name}{sentence}" for sentence in _notes_of_run(run)]
            if run.finished:
                sets.setdefault(run.dataset, {}).setdefault(run.results["protocol"], []).append(name)
    for dataset, found in sets.items():
        if len(found) > 1:
            notes += [f"Test set of {', '.join(dict.fromkeys(of))} on {dataset}: {name}" for name, of in found.items()]
    return list(dict.fromkeys(notes))


def _notes_of_run(run: ReportedRun) -> list[str]:
    results, notes = run.results, []
    if not run.finished:
        error = one_line(run.card.error or "")
        notes.append(f" FAILED (see {run.key}.json): {error[:NOTE_LENGTH]}{' ...' if len(error) > NOTE_LENGTH else ''}")
    notes += [f": {mark}" for mark in results.get("warnings", []) if mark != SYNTHETIC]
    if (audit := results.get("audit")) is not None and not audit["passed"]:
        notes.append(f": {AuditResult(**audit)}")
    overridden = results.get("weights", {}).get("overridden", [])
    notes += [f": scored with another option than in training: {option}" for option in overridden]
    if results.get("partial"):
        notes.append(": PARTIAL, not all texts and videos of the split were ranked")
    if results.get("transductive"):
        notes.append(f": {results['post_processing']} uses the whole test set")
    if results.get("skipped"):
        notes.append(f": skipped {len(results['skipped'])} files")
    return notes


def _shared(runs: Sequence[ReportedRun]) -> list[str]:
    """Return sentences about the encoders that runs on synthetic data share and how long they train."""
    shared = {run.planned["share"] for run in runs}
    encoders = ", ".join(sorted({f"{key}.json" for run in runs if (key := run.planned["encoder_from"])}))
    epochs = ", ".join(map(str, sorted({run.card.epochs for run in runs if run.card.epochs}))) or "no"
    notes = []
    if "features" in shared:
        notes = [
            f"Heads are trained for {epochs} epochs on the stored features of one frozen encoder: {encoders}; the "
            "effect of a method on its encoder is not included in these results",
            "Runs with other backbones are omitted, since the fixture has only one encoder",
        ]
    elif "encoder" in shared:
        notes = [f"Every run trains for {epochs} epochs, starting from the same trained encoder: {encoders}"]
    if any(is_synthetic(run) for run in runs):
        notes.append("The fixture's tiny encoder replaces every backbone, so rows with other backbones share one run")
    return notes


def write_tables(views: Sequence[TableView], path: Path) -> list[Path]:
    """Write tables as Markdown, CSV, and LaTeX; return the files, whose suffixes are added to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    formats = {".md": markdown, ".csv": comma_separated, ".tex": latex}
    for suffix, written in formats.items():
        write_whole(path.with_name(path.name + suffix), written(*views).encode())
    return [path.with_name(path.name + suffix) for suffix in formats]


def markdown(*views: TableView) -> str:
    """Return tables with their statistics, notes, and runs as Markdown."""
    parts = []
    for view in views:
        parts += [f"## {_titled(view)}", _markdown_table(view.wide()), MEASURED + ("" if view.caution else DIFFERENCE)]
        for title, sentences in (("Statistics", view.statistics), ("Notes", view.notes)):
            if sentences:
                parts.append(f"### {title}\n\n" + "\n".join(f"- {one_line(sentence)}" for sentence in sentences))
        if len(runs := view.run_table()):
            parts.append(f"### Runs\n\n{_markdown_table(runs)}")
    return "\n\n".join(parts) + "\n"


def _titled(view: TableView) -> str:
    return f"{view.title} - {view.caution}" if view.caution else view.title


def _markdown_table(frame: pd.DataFrame) -> str:
    # DataFrame.to_markdown needs another package and does not escape.
    head = [column if isinstance(column, str) else " ".join(filter(None, column)) for column in frame.columns]
    rows = [head, ["---"] * len(head), *frame.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(one_line(cell).replace("|", r"\|") for cell in row) + " |" for row in rows)


def latex(*views: TableView) -> str:
    """Return tables with their statistics and notes as LaTeX, for the package booktabs."""
    parts = []
    for view in views:
        sentences = [one_line(sentence) for sentence in (*view.statistics, *view.notes)]
        below = pd.DataFrame({_titled(view): sentences or [MEASURED]})
        parts.append(view.wide().to_latex(index=False, escape=True, multicolumn_format="c"))
        parts.append(below.to_latex(index=False, escape=True, column_format=r"p{\linewidth}"))
    return "\n".join(parts)


def comma_separated(*views: TableView) -> str:
    """Return one row per published row and metric, with the run cards of every measured value."""
    frames = [view.results[COLUMNS].dropna(how="all", subset=["published", "measured"]) for view in views]
    return "".join(frame.to_csv(index=False, header=frame is frames[0], lineterminator="\n") for frame in frames)
