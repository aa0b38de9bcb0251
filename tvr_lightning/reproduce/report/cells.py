"""A table to be read: the printed lines, what the cards say beside them, and what stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvr_lightning.evaluation.statistics import Comparison
from tvr_lightning.reproduce.published import PRINTED, Printed, PublishedRow
from tvr_lightning.reproduce.report.uncertainty import (
    Measured,
    compare_runs,
    measure,
    smallest_difference,
    unrelated_queries,
)
from tvr_lightning.reproduce.runs.card import Card, CardDirection
from tvr_lightning.reproduce.runs.plan import Plan, PlannedRun, Setting
from tvr_lightning.reproduce.tables import TableRecipe

NOT_COMPARABLE = "SYNTHETIC FIXTURE: the measured numbers are not comparable with the published ones"
NOTE_LENGTH = 400
DIRECTIONS: dict[str, CardDirection] = {"t2v": "text_to_video", "v2t": "video_to_text"}
UNPRINTED: tuple[Printed, ...] = ("R@1", "R@5", "R@10", "MnR")  # of figures, which print no numbers


@dataclass
class Line:
    """One printed row and what was measured for it.

    Attributes:
        published: the row.
        run: name of the run that stands for it, or None where it is published only.
        cards: finished cards of that run, one per seed.
        measured: metric to figure.
        baseline: run of the table that it is compared with, of the same backbone and queries; None without.
        against_baseline: metric to its difference from that run.
    """

    published: PublishedRow
    run: str | None
    cards: list[Card] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    baseline: str | None = None
    against_baseline: dict[str, Comparison] = field(default_factory=dict)


@dataclass
class TableView:
    """A table, ready to be written in any format.

    Attributes:
        name: of the table's recipe.
        title: paper, number, and that synthetic numbers are not comparable.
        metrics: columns.
        lines: in the order of the print.
        comparable: whether measured numbers may be set against the published ones.
        runs: what stands behind the measured numbers: run name to its planned runs and their cards.
        statistics: sentences on differences and resolution.
        notes: what a reader must know: notes of the print, failed runs, marks, skipped files.
    """

    name: str
    title: str
    metrics: list[Printed]
    lines: list[Line]
    comparable: bool
    runs: dict[str, list[tuple[PlannedRun, Card | None]]]
    statistics: list[str]
    notes: list[str]


def view_table(table: TableRecipe, plan: Plan, cards: dict[str, Card], folder: Path) -> TableView:
    """Set a table's cards beside its printed lines.

    Args:
        table: of the plan.
        plan: which run has which key.
        cards: by key.
        folder: of the cards, for their ranks.
    """
    rows = table.published()
    shown = UNPRINTED if any(run.shows is not None for run in table.runs) else ()
    metrics = [name for name in PRINTED if name in shown or any(row.printed(name) is not None for row in rows)]
    runs = {
        run.name: [(plan.runs[key], cards.get(key)) for key in plan.chosen.get(f"{table.name}/{run.name}", [])]
        for run in table.runs
    }
    run_of = {run.entry: run.name for run in table.runs}
    backbone_of = {run_of.get(row.entry): row.backbone for row in rows}
    lines = []
    for row in rows:
        line = Line(row, run_of.get(row.entry))
        if line.run is not None:
            line.cards = _finished(runs[line.run])
            direction = DIRECTIONS.get(row.direction or "", "text_to_video")
            for metric in metrics if line.cards else []:
                found = measure(line.cards, folder, direction, metric) if _belongs(metric, row.direction) else None
                if found is None:
                    continue
                line.measured[metric] = found
                for baseline in table.baselines if line.run not in table.baselines else ():
                    # Not every line prints its backbone.
                    other = len({backbone_of[baseline], row.backbone} - {None}) > 1
                    base = [] if other else _finished(runs[baseline])
                    compared = compare_runs(base, line.cards, folder, direction, metric) if base else None
                    if compared is not None:
                        line.baseline, line.against_baseline[metric] = baseline, compared
        lines.append(line)
    return TableView(
        name=table.name,
        title=_title(table, plan.setting),
        metrics=metrics,
        lines=lines,
        comparable=plan.setting.fixture_videos is None and plan.setting.overlay is None,
        runs=runs,
        statistics=[*_resolution(lines, folder), *_differences(lines)],
        notes=[*([table.note] if table.note else []), *_notes(lines, runs, plan.setting)],
    )


def _belongs(metric: Printed, direction: str | None) -> bool:
    """Whether a row of a direction has a metric: SumR belongs to both directions, accuracy to none."""
    if direction in DIRECTIONS:
        return metric != "accuracy"
    return metric == ("accuracy" if direction is None else "SumR")


def _finished(runs: Sequence[tuple[PlannedRun, Card | None]]) -> list[Card]:
    return [card for _, card in runs if card is not None and card.status == "finished"]


def _title(table: TableRecipe, setting: Setting) -> str:
    paper = table.published()[0].paper
    number = table.table.replace("Fig", "Figure ") if table.table.startswith("Fig") else f"Table {table.table}"
    title = f"{paper}, {number}"
    if setting.fixture_videos is not None:
        title += f" - {NOT_COMPARABLE}"
    if setting.overlay is not None:
        title += f" - every run with {setting.overlay} on top, not the published settings"
    return title


def _shortened(text: str) -> str:
    words = " / ".join(part.strip() for part in text.splitlines() if part.strip())
    return words if len(words) <= NOTE_LENGTH else words[:NOTE_LENGTH] + " ..."


def _resolution(lines: Sequence[Line], folder: Path) -> list[str]:
    said = []
    for direction, long in DIRECTIONS.items():
        # The same sentence for every line of one test set would repeat itself; its best recall gives one per set.
        best: dict[tuple[str | None, int, int], Line] = {}
        for line in lines:
            if line.published.direction == direction and "R@1" in line.measured:
                queries, videos, _ = unrelated_queries(line.cards[0], folder, long)
                other = best.setdefault((line.published.dataset, queries, videos), line)
                if line.measured["R@1"].mean > other.measured["R@1"].mean:
                    best[line.published.dataset, queries, videos] = line
        for (dataset, queries, videos), line in best.items():
            recall, worth = line.measured["R@1"].mean, unrelated_queries(line.cards[0], folder, long)[2]
            of_videos = f" on {videos} videos, worth {worth:.0f} unrelated ones," if videos < queries else ""
            said.append(
                f"{dataset or 'the test set'}, {direction}: {queries} queries{of_videos} resolve a difference of "
                f"{smallest_difference(recall, worth):.1f} points at R@1 {recall:.1f} (95 %, unrelated errors)"
            )
    return said


def _differences(lines: Sequence[Line]) -> list[str]:
    said = [
        f"{line.run} against {line.baseline}, {line.published.direction} R@1: "
        f"{comparison_words(line.against_baseline['R@1'])}"
        for line in lines
        if "R@1" in line.against_baseline
    ]
    return [*dict.fromkeys(said), *(["Differences of the other metrics: in the table's CSV file"] if said else [])]


def comparison_words(found: Comparison) -> str:
    """Return a paired difference in words: points, interval over queries, p-value."""
    d = found.difference
    verdict = "resolved" if d.low > 0 or d.high < 0 else "not resolved"
    return (
        f"{d.estimate:+.1f} [{d.low:+.1f}, {d.high:+.1f}] points, p {found.p_value:.2g}, paired over queries, {verdict}"
    )


def _notes(lines: Sequence[Line], runs: dict[str, list[tuple[PlannedRun, Card | None]]], setting: Setting) -> list[str]:
    notes = []
    for line in lines:
        row = line.published
        where = ", ".join(filter(None, (row.method, row.variant, row.dataset, row.backbone, row.direction)))
        notes += [f"Print, {where}: {remark}" for remark in row.remarks()]
    for name, made in runs.items():
        for _, card in made:
            if card is None:
                continue
            if card.status == "failed":
                notes.append(f"Run {name} FAILED, {card.key}.json says: {_shortened(card.error or '')}")
            results = card.results or {}
            notes += [f"Run {name}: {mark}" for mark in results.get("marks", [])]
            if results.get("partial"):
                notes.append(f"Run {name}: PARTIAL, not every text and video of the split was ranked")
            if results.get("transductive"):
                notes.append(f"Run {name}: {results['post_processing']} sees the test set as a whole")
            if results.get("skipped"):
                notes.append(f"Run {name}: skipped {len(results['skipped'])} files")
    notes += _shared(setting, runs)
    if setting.fixture_videos is not None:
        notes.append("The fixture's tiny encoder stands for every backbone, so lines of two backbones share one run")
    return list(dict.fromkeys(notes))


def _shared(setting: Setting, runs: dict[str, list[tuple[PlannedRun, Card | None]]]) -> list[str]:
    """What runs on the fixture have in common, and how long they train."""
    if setting.share == "nothing":
        return []
    keys = sorted({run.encoder_from for made in runs.values() for run, _ in made if run.encoder_from})
    epochs = sorted({card.epochs for made in runs.values() for _, card in made if card and card.epochs})
    trained = ", ".join(map(str, epochs)) or "no"
    encoders = ", ".join(f"{key}.json" for key in keys)
    if setting.share == "encoder":
        return [f"Every run goes on, for {trained} epochs, from one encoder, trained once: {encoders}"]
    return [
        f"Heads train for {trained} epochs on the stored features of one frozen encoder: {encoders}; what "
        "a method does to its encoder is not in these numbers",
        "Runs of further backbones are left out: the fixture has one encoder",
    ]
