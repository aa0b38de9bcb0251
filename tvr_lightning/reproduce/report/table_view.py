"""A published table next to what was measured for it, as one pandas table that every format is written from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.evaluation.external_scores import SCORE_WARNINGS
from tvr_lightning.evaluation.intervals import MEANING
from tvr_lightning.evaluation.statistics import effective_queries, holm
from tvr_lightning.files import write_whole
from tvr_lightning.reproduce.published import CLOSE, PRINTED, PublishedRow, close_to_best, printed_figure
from tvr_lightning.reproduce.report.drawing import shortened
from tvr_lightning.reproduce.report.sources import ReportedRun, compare_runs, measure, read_ranks, smallest_difference
from tvr_lightning.reproduce.runs.card import CardDirection
from tvr_lightning.reproduce.tables import TableRecipe

NOT_COMPARABLE = "SYNTHETIC FIXTURE: the measured numbers are not comparable with the published ones"
MEASURED = f"Here: measured, with the 95 % interval in brackets, and ± the deviation over seeds. {MEANING}"
PAIRED = (
    "Differences are paired over queries, with 95 % intervals. p-values of random exchanges are corrected by Holm for "
    "all pairs of systems in a direction and metric. 80 % power: the true difference that such a test set shows with "
    "this probability, before the correction."
)
DIFFERENCE = " Difference: measured minus published, with the measured interval; the papers publish none."
WARNINGS = {
    "leaks": "ground truth leaks into the scores",
    "not audited": "no leakage audit was completed",
    "overridden": "scored with other options than in training",
    "external": "scores of another program, which cannot be audited",
    "transductive": "the normalization uses the other test queries, so the intervals may be too narrow",
    "synthetic": "measured on synthetic data",
    **SCORE_WARNINGS,
}
DIRECTIONS: dict[str, CardDirection] = {"t2v": "text_to_video", "v2t": "video_to_text"}
UNPRINTED = ("R@1", "R@5", "R@10", "MnR")  # metrics of figures, for which the papers print no numbers
COLUMNS = [  # of the CSV file
    "title", "method", "variant", "dataset", "backbone", "direction", "metric", "published", "measured", "low", "high",
    "deviation", "seeds", "difference", "against_baseline", "against_baseline_low", "against_baseline_high",
    "against_baseline_p", "baseline", "run", "cards", "warnings", "remarks",
]  # fmt: skip
TEXTS = {"published_text": "published", "text": "here", "difference_text": "difference"}  # headings of columns to read
RUN_FIELDS = [  # of a run card, in the table of runs
    "name", "results.seed", "status", "results.protocol", "results.select_on", "results.post_processing",
    "results.precision", "steps", "epochs", "seconds", "peak_memory_mib", "run.fingerprints.data",
    "run.fingerprints.weights", "run.fingerprints.code", "key",
]  # fmt: skip


@dataclass
class TableView:
    """A table that can be written in any format.

    `results` has one row per published row and metric, with the columns COLUMNS, TEXTS, `line`, and `name`; `runs` are
    the runs by name, one per seed; `caution` states why they must not be compared with the published ones;
    `differences` has one row per pair of systems, direction, and metric; None if runs stand for published rows.
    """

    name: str
    title: str
    caution: str
    results: pd.DataFrame
    runs: Mapping[str, Sequence[ReportedRun]]
    statistics: list[str]
    notes: list[str]
    differences: pd.DataFrame | None = None

    @property
    def finished(self) -> dict[str, list[ReportedRun]]:
        """Finished runs by name, without the names that have none."""
        return {name: own for name, runs in self.runs.items() if (own := [run for run in runs if run.finished])}

    @property
    def explanation(self) -> str:
        """Meaning of the measured values."""
        difference = DIFFERENCE if self.results["difference"].notna().any() else ""
        close = f" {CLOSE}" if self.results["published_text"].astype(str).str.endswith("~").any() else ""
        return MEASURED + difference + close

    def wide(self) -> pd.DataFrame:
        """Return the results as text: one row per published row, columns by metric, without empty columns."""
        cells = self.results.pivot(index="line", columns="metric", values=list(TEXTS)).astype(object).fillna("")
        rows = self.results.drop_duplicates("line").set_index("line")
        # The title states once that a table is synthetic.
        marks = rows["warnings"].str.removesuffix("synthetic").str.removesuffix(", ")
        table = {("method", ""): rows["name"] + marks.map(lambda shown: shown and f" [{shown}]")}
        for name, column in (("data", "dataset"), ("backbone", "backbone"), ("direction", "direction")):
            table[name, ""] = rows[column].astype(object).fillna("-")
        for metric in self.results["metric"].unique():
            for column, heading in TEXTS.items():
                if cells[column, metric].any() and (heading != "difference" or metric == "R@1"):
                    table[metric, heading] = cells[column, metric].replace("", "-")
        return pd.DataFrame(table)

    def difference_table(self) -> pd.DataFrame:
        """Return the differences in R@1 and SumR as text; empty if systems are not compared with each other."""
        if self.differences is None or self.differences.empty:
            return pd.DataFrame()
        rows = self.differences[self.differences["metric"].isin(["R@1", "SumR"])]
        shown = rows[["system", "compared with", "direction", "metric"]].copy()
        ends = zip(rows["difference"], rows["low"], rows["high"], strict=True)
        shown["difference"] = [f"{estimate:+.1f} [{low:+.1f}, {high:+.1f}]" for estimate, low, high in ends]
        shown["p (Holm)"] = rows["p_holm"].map("{:.2g}".format)
        shown["80 % power"] = rows["power_80"].map("{:.1f}".format)
        shown["result"] = rows["resolved"].map({True: "resolved", False: "not resolved"})
        return shown

    def run_table(self) -> pd.DataFrame:
        """Return facts about each run as text, one row per seed."""
        cards = pd.json_normalize([asdict(run.card) for own in self.runs.values() for run in own])
        table = cards.reindex(columns=RUN_FIELDS).astype(object)
        table.columns = pd.Index([field.rpartition(".")[2].replace("_", " ") for field in RUN_FIELDS])
        return filled(table.map(lambda value: "-" if pd.isna(value) else str(value)))


def view_table(table: TableRecipe, runs: Sequence[ReportedRun]) -> TableView:
    """Compare the published rows of a table with those of the runs that stand for them."""
    runs = sorted(runs, key=lambda run: run.seed or 0)
    made = {row.name: [run for run in runs if f"{table.name}/{row.name}" in run.claims] for row in table.runs}
    own_runs = [run for own in made.values() for run in own]
    number = table.table.replace("Fig", "Figure ") if table.table.startswith("Fig") else f"Table {table.table}"
    cautions = [NOT_COMPARABLE] if any(is_synthetic(run) for run in own_runs) else []
    overlays = [run.planned["overlay"] for run in own_runs if run.planned["overlay"] is not None]
    cautions += [f"every run with the overlay {path}, not with the published settings" for path in overlays[:1]]
    title = f"{table.rows[0].paper}, {number}"
    view = TableView(table.name, title, "; ".join(cautions), pd.DataFrame(), made, [], [])
    view.results = pd.DataFrame(_records(table, view), columns=["line", "name", *COLUMNS, *TEXTS])
    view.notes = list(dict.fromkeys(filter(None, [table.note, *_notes(table.rows, made), legend_of(own_runs)])))
    view.statistics = [*resolution(view.results, view.finished), *_differences(view.results)]
    return view


def _records(table: TableRecipe, view: TableView) -> Iterator[dict[str, Any]]:
    """Return the results of every row and metric."""
    shown = UNPRINTED if any(run.shows is not None for run in table.runs) else ()
    metrics = [name for name in PRINTED if name in shown or any(row.printed(name) is not None for row in table.rows)]
    run_of = {run.entry: run.name for run in table.runs}
    backbone_of = {run_of.get(row.entry): row.backbone for row in table.rows}
    for line, (row, close) in enumerate(zip(table.rows, close_to_best(table.rows), strict=True)):
        name = run_of.get(row.entry)
        own = view.finished.get(name or "", [])
        # Not every row states its backbone.
        baselines = {
            base: view.finished[base]
            for base in table.baselines
            if own and base in view.finished and name not in table.baselines
            and len({backbone_of[base], row.backbone} - {None}) < 2
        }  # fmt: skip
        common = {
            "line": line, "title": view.title, "name": row.full_method, "method": row.method, "variant": row.variant,
            "dataset": row.dataset, "backbone": row.backbone, "direction": row.direction, "run": name,
            "cards": " ".join(f"{run.key}.json" for run in own), "warnings": ", ".join(warnings_of(own)),
            "remarks": row.note or "",
        }  # fmt: skip
        direction = DIRECTIONS.get(row.direction or "", "text_to_video")
        for metric in metrics:
            published = row.printed(metric)
            cell: dict[str, Any] = {**common, "metric": metric, "published": published}
            cell["published_text"] = "" if published is None else printed_figure(published)
            if close and metric == "R@1":
                cell["published_text"] += "~"
            belongs = row.direction in DIRECTIONS or metric == ("SumR" if row.direction else "accuracy")
            if belongs and (found := measure(own, direction, metric)) is not None:
                cell |= found.cell()
                for base, runs in baselines.items():  # of which one ranked the same queries
                    if (compared := compare_runs(runs, own, direction, metric)) is not None:
                        d = compared.difference
                        cell |= {"baseline": base, "against_baseline": d.estimate, "against_baseline_low": d.low,
                                 "against_baseline_high": d.high, "against_baseline_p": compared.p_value}  # fmt: skip
                if published is not None and not view.caution:
                    cell["difference"] = found.mean - published
                    low, high = cell["low"], cell["high"]
                    ends = f" [{low - published:+.1f}, {high - published:+.1f}]" if found.interval else ""
                    cell["difference_text"] = f"{found.mean - published:+.1f}{ends}"
            yield cell


def filled(table: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of a table of texts that contain more than dashes."""
    return table.loc[:, (table != "-").any()]


def is_synthetic(run: ReportedRun) -> bool:
    """Return whether a run used synthetic data."""
    return run.planned["fixture_videos"] is not None or SYNTHETIC in run.results.get("warnings", [])


def warnings_of(runs: Sequence[ReportedRun]) -> list[str]:
    """Return those of WARNINGS that apply to any of the runs."""
    marks = dict.fromkeys(WARNINGS, False)
    for run in runs:
        if run.finished:
            audit = run.results.get("audit")
            warnings = run.results.get("warnings", [])
            marks["leaks"] |= LEAKS in warnings or bool(audit and audit["leaks"])
            marks["external" if run.external else "not audited"] |= audit is None or audit["problem"] is not None
            marks["overridden"] |= bool(run.results.get("weights", {}).get("overridden"))
            marks["transductive"] |= bool(run.results.get("transductive"))
            marks["synthetic"] |= SYNTHETIC in warnings
            for mark in SCORE_WARNINGS:
                marks[mark] |= any(warning.startswith(f"{mark}: ") for warning in warnings)
    return [mark for mark, applies in marks.items() if applies]


def legend_of(runs: Sequence[ReportedRun]) -> str:
    """Return the meaning of the warnings about runs as one sentence; empty without warnings."""
    meanings = [f"{mark}: {WARNINGS[mark]}" for mark in warnings_of(runs) if mark != "synthetic"]
    return f"Warnings: {'; '.join(meanings)}." if meanings else ""


def resolution(results: pd.DataFrame, finished: Mapping[str, Sequence[ReportedRun]]) -> Iterator[str]:
    """Return the smallest resolved difference at the best R@1 of each test set."""
    best: dict[tuple[str, str, int, int], tuple[float, float]] = {}
    measured = results[(results["metric"] == "R@1") & results["measured"].notna()]
    for row in measured.sort_values("measured", kind="stable").to_dict("records"):
        ranks, video = read_ranks(finished[row["run"]][0], DIRECTIONS[row["direction"]])
        key = row["direction"], row["dataset"] or "the test set", len(ranks), len(video.unique())
        best[key] = row["measured"], effective_queries(ranks.found_within(1), video)
    for (direction, dataset, queries, videos), (recall, worth) in sorted(best.items()):
        of_videos = f" on {videos:,} videos (effectively {worth:,.0f} unrelated ones)" if videos < queries else ""
        yield (
            f"{dataset}, {direction}: {queries:,} queries{of_videos} resolve a difference of "
            f"{smallest_difference(recall, worth):.1f} points at R@1 {recall:.1f} (95 %, unrelated errors)"
        )


def _differences(results: pd.DataFrame) -> list[str]:
    sentences = []
    compared = results[(results["metric"] == "R@1") & results["against_baseline"].notna()]
    for direction, own in compared.drop_duplicates(["run", "baseline", "direction"]).groupby("direction", sort=False):
        for row, p in zip(own.to_dict("records"), holm(own["against_baseline_p"].tolist()), strict=True):
            d, low, high = (row[f"against_baseline{name}"] for name in ("", "_low", "_high"))
            sentences.append(
                f"{row['run']} against {row['baseline']}, {direction} R@1: {d:+.1f} [{low:+.1f}, {high:+.1f}] "
                f"points, p {p:.2g} (Holm), paired over queries, {'resolved' if p < 0.05 else 'not resolved'}"
            )
    return [*sentences, *(["Differences in the other metrics are in the CSV file"] if sentences else [])]


def one_line(text: str) -> str:
    """Return a text with slashes instead of line breaks."""
    return " / ".join(part.strip() for part in text.splitlines() if part.strip())


def _notes(rows: Sequence[PublishedRow], made: Mapping[str, Sequence[ReportedRun]]) -> Iterator[str]:
    """Yield sentences about the published rows, about every run, and about what the runs share."""
    for row in rows:
        if row.note:
            whose = ", ".join(filter(None, (row.full_method, row.dataset, row.backbone, row.direction)))
            yield f"Published, {whose}: {row.note}"
    sets: dict[str, dict[str, list[str]]] = {}
    for name, runs in made.items():
        for run in runs:
            yield from (f"Run {name}{sentence}" for sentence in notes_of_run(run))
            if run.finished:
                sets.setdefault(run.dataset, {}).setdefault(run.results["protocol"], []).append(name)
    for dataset, found in sets.items():
        if len(found) > 1:
            for protocol, of in found.items():
                yield f"Test set of {', '.join(dict.fromkeys(of))} on {dataset}: {protocol}"
    runs = [run for own in made.values() for run in own]
    shared = {run.planned["share"] for run in runs}
    encoders = ", ".join(sorted({f"{key}.json" for run in runs if (key := run.planned["needs"].get("encoder"))}))
    epochs = ", ".join(map(str, sorted({run.card.epochs for run in runs if run.card.epochs}))) or "no"
    if "features" in shared:
        yield (
            f"Heads are trained for {epochs} epochs on the stored features of one frozen encoder: {encoders}; the "
            "effect of a method on its encoder is not included in these results"
        )
        yield "Runs with other backbones are omitted, since the fixture has only one encoder"
    elif "encoder" in shared:
        yield f"Every run trains for {epochs} epochs, starting from the same trained encoder: {encoders}"
    if any(is_synthetic(run) for run in runs):
        yield "The fixture's tiny encoder replaces every backbone, so rows with other backbones share one run"


def notes_of_run(run: ReportedRun) -> Iterator[str]:
    """Yield ends of sentences that begin with the name of a run."""
    results = run.results
    if not run.finished:
        yield f" FAILED (see {run.key}.json): {shortened(one_line(run.card.error or ''), 400)}"
    yield from (f": {mark}" for mark in results.get("warnings", []) if mark != SYNTHETIC)
    if (audit := results.get("audit")) is not None and not audit["passed"]:
        yield f": {AuditResult(**audit)}"
    for option in results.get("weights", {}).get("overridden", []):
        yield f": scored with another option than in training: {option}"
    if results.get("partial"):
        yield ": PARTIAL, not all texts and videos of the split were ranked"
    if results.get("transductive"):
        yield f": {results['post_processing']} uses the whole test set"
    if results.get("skipped"):
        yield f": skipped {len(results['skipped'])} files"


def write_tables(views: Sequence[TableView], path: Path) -> list[Path]:
    """Write tables as Markdown, CSV, and LaTeX; return the files, whose suffixes are added to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(path.name + suffix) for suffix in (".md", ".csv", ".tex")]
    for file, written in zip(files, (markdown, comma_separated, latex), strict=True):
        write_whole(file, written(*views).encode())
    compared = [view.differences.assign(title=view.title) for view in views if view.differences is not None]
    if compared and len(differences := pd.concat(compared)):
        files.append(path.with_name(f"{path.name}-differences.csv"))
        write_whole(files[-1], differences.to_csv(index=False, lineterminator="\n").encode())
    return files


def markdown(*views: TableView) -> str:
    """Return tables with their statistics, notes, and runs as Markdown."""
    parts = []
    for view in views:
        parts += [f"## {_titled(view)}", markdown_table(filled(view.wide())), view.explanation]
        for title, sentences in (("Statistics", view.statistics), ("Notes", view.notes)):
            if sentences:
                parts.append(f"### {title}\n\n" + "\n".join(f"- {one_line(sentence)}" for sentence in sentences))
        if len(differences := view.difference_table()):
            parts.append(f"### Differences\n\n{markdown_table(differences)}\n\n{PAIRED}")
        if len(runs := view.run_table()):
            parts.append(f"### Runs\n\n{markdown_table(runs)}")
    return "\n\n".join(parts) + "\n"


def _titled(view: TableView) -> str:
    return f"{view.title} - {view.caution}" if view.caution else view.title


def markdown_table(frame: pd.DataFrame) -> str:
    """Return a table of texts as Markdown."""
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
        parts.append(filled(view.wide()).to_latex(index=False, escape=True, multicolumn_format="c"))
        if len(differences := view.difference_table()):
            parts.append(differences.to_latex(index=False, escape=True))
            below.loc[len(below)] = PAIRED
        parts.append(below.to_latex(index=False, escape=True, column_format=r"p{\linewidth}"))
    return "\n".join(parts)


def comma_separated(*views: TableView) -> str:
    """Return one row per published row and metric, with the run cards of every measured value."""
    frames = [view.results[COLUMNS].dropna(how="all", subset=["published", "measured"]) for view in views]
    return "".join(frame.to_csv(index=False, header=frame is frames[0], lineterminator="\n") for frame in frames)
