"""A table to be read: the printed lines, in each a cell per metric, and what stands behind the measured numbers.

Every format writes the same columns of the same cells; `formats` as text, the page as HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tvr_lightning.data.records import SYNTHETIC
from tvr_lightning.evaluation.evaluator import LEAKS
from tvr_lightning.evaluation.statistics import Comparison
from tvr_lightning.evaluation.verdict import Verdict
from tvr_lightning.reproduce.published import PRINTED, Printed, PublishedRow, printed_figure, unprinted_row
from tvr_lightning.reproduce.report.uncertainty import (
    Measured,
    compare_runs,
    measure,
    smallest_difference,
    unrelated_queries,
)
from tvr_lightning.reproduce.runs.card import Card, CardDirection
from tvr_lightning.reproduce.runs.plan import PlannedRun
from tvr_lightning.reproduce.tables import TableRecipe

NOT_COMPARABLE = "SYNTHETIC FIXTURE: the measured numbers are not comparable with the published ones"
NOTE_LENGTH = 400
WARNINGS = {
    "leaks": "ground truth leaks into the scores",
    "not audited": "no leakage audit was completed",
    "overridden": "scored with other options than in training",
    "synthetic": "measured on synthetic data",
}
"""Marks of a line, in the order in which they are shown, and what each means."""
DIRECTIONS: dict[str, CardDirection] = {"t2v": "text_to_video", "v2t": "video_to_text"}
BLOCKS = {"t2v": "Text to video", "v2t": "Video to text", "t2v+v2t": "Both directions"}
UNPRINTED: tuple[Printed, ...] = ("R@1", "R@5", "R@10", "MnR")  # of figures, which print no numbers
NAMES = ("method", "data", "backbone", "direction")
"""Headings of what a line is, before its cells."""

DATE = "results.environment.date"
RUN_FIELDS: dict[str, tuple[str, ...]] = {
    "seed": ("results.seed", "run.seed"),
    "state": ("status",),
    "dataset": ("results.dataset",),
    "protocol": ("results.protocol",),
    "encoder frozen": ("results.config.model.init_args.encoder.init_args.freeze",),
    "encoder from run": ("run.encoder_from",),
    "read from stored features": ("run.store",),
    "weights selected on": ("results.select_on", "results.weights.kind"),
    "post-processing": ("results.post_processing",),
    "precision": ("results.precision",),
    "steps": ("steps",),
    "epochs": ("epochs",),
    "seconds": ("seconds",),
    "peak memory, MiB": ("peak_memory_mib",),
    "peak memory of the GPU, MiB": ("peak_device_memory_mib",),
    "texts": ("results.texts",),
    "videos": ("results.videos",),
    "data": ("run.fingerprints.data",),
    "weights": ("run.fingerprints.weights",),
    "code": ("run.fingerprints.code",),
    "machine": ("results.environment.machine",),
    "date": (DATE,),
}
"""What a reader needs to judge a run: the fields of its card, of which the first that is there counts."""

Column = Literal["published", "measured", "difference"]
MadeRuns = Mapping[str, Sequence[tuple[PlannedRun, Card | None]]]
"""Runs of a table by their names in it, one per seed, each with its card where it has one."""


@dataclass(frozen=True)
class Cell:
    """One metric of one line.

    Attributes:
        published: as printed; None where the paper does not print it.
        measured: by the line's run; None without.
        difference: measured minus published, with the measured interval, for the print has none; None where either is
            missing or they must not be compared.
        against_baseline: measured minus what the baseline's run measured; None without.
    """

    published: float | None
    measured: Measured | None = None
    difference: Measured | None = None
    against_baseline: Comparison | None = None

    def numbers(self, column: Column) -> dict[str, str]:
        """Return a column's numbers as they are written, by what they are: `published`, or `mean`, `low` and so on."""
        if column == "published":
            return {} if self.published is None else {"published": printed_figure(self.published)}
        found, form = (self.measured, ".1f") if column == "measured" else (self.difference, "+.1f")
        if found is None:
            return {}
        interval = found.interval
        values = {
            "mean": found.mean,
            "deviation": found.deviation,
            "low": interval.low if interval else None,
            "high": interval.high if interval else None,
        }
        return {name: format(value, form) for name, value in values.items() if value is not None}

    def text(self, column: Column) -> str:
        """Return a column as text; empty where there is nothing."""
        numbers = self.numbers(column)
        deviation = f" ± {numbers['deviation']}" if "deviation" in numbers else ""
        interval = f" [{numbers['low']}, {numbers['high']}]" if "low" in numbers else ""
        return numbers.get("published", "") + numbers.get("mean", "") + deviation + interval


@dataclass
class Line:
    """One printed row and what was measured for it.

    Attributes:
        published: the row.
        run: name of the run that stands for it, or None where it is published only.
        cards: finished cards of that run, one per seed.
        cells: by metric.
        baseline: run of the table that it is compared with, of the same backbone and queries; None without.
    """

    published: PublishedRow
    run: str | None
    cards: list[Card] = field(default_factory=list)
    cells: dict[Printed, Cell] = field(default_factory=dict)
    baseline: str | None = None

    @property
    def names(self) -> tuple[str | None, ...]:
        """What the line is, one for each of NAMES; None where the print does not say."""
        row = self.published
        return row.full_method, row.dataset, row.backbone, row.direction

    @property
    def keys(self) -> str:
        """Keys of its cards."""
        return " ".join(card.key for card in self.cards)

    @property
    def warnings(self) -> list[str]:
        """Those of WARNINGS that hold for any of its cards."""
        found = {mark for card in self.cards for mark in _warnings(card.results or {})}
        return [mark for mark in WARNINGS if mark in found]

    def measured(self, metric: Printed) -> Measured | None:
        """Return what was measured of a metric; None where nothing was, or the table lacks the metric."""
        return self.cells[metric].measured if metric in self.cells else None

    def field(self, metric: Printed) -> str:
        """Return which field of the line's cards a metric is, as a dotted path."""
        direction = DIRECTIONS.get(self.published.direction or "", "")
        elsewhere = {"SumR": "sum_of_recalls", "accuracy": "evaluation.accuracy"}
        return f"results.{elsewhere.get(metric, f'{direction}.{metric}')}"


@dataclass
class Block:
    """The lines of a table in one direction.

    Attributes:
        direction: `t2v`, `v2t`, `t2v+v2t` or None.
        lines: in the order of the print.
        offered: columns of the table.
    """

    direction: str | None
    lines: list[Line]
    offered: list[tuple[Printed, Column]]

    @property
    def columns(self) -> dict[Printed, list[Column]]:
        """By metric, those of the table's columns that hold anything in this direction."""
        found: dict[Printed, list[Column]] = {}
        for metric, column in self.offered:
            if any(line.cells[metric].numbers(column) for line in self.lines):
                found.setdefault(metric, []).append(column)
        return found

    @property
    def named(self) -> list[int]:
        """Which of a line's names, besides the method, tell its lines apart: places in NAMES."""
        return [place for place in (1, 2) if len({line.names[place] for line in self.lines}) > 1]

    @property
    def title(self) -> str:
        """Its direction, and the data and backbone that all its lines share."""
        shared = [self.lines[0].names[place] for place in (1, 2) if place not in self.named]
        return ", ".join([BLOCKS.get(self.direction or "", "Results"), *filter(None, shared)])


@dataclass
class TableView:
    """A table, ready to be written in any format.

    Attributes:
        name: of the table's recipe.
        title: paper, number, and that synthetic numbers are not comparable.
        metrics: in the order of the print.
        lines: in the order of the print.
        comparable: whether measured numbers may be set against the published ones.
        runs: what stands behind the measured numbers.
        statistics: sentences on differences and resolution.
        notes: what a reader must know: notes of the print, failed runs, warnings, skipped files.
        unprinted: recalls of its runs in a direction of which the print has no line; in no format's table.
    """

    name: str
    title: str
    metrics: list[Printed]
    lines: list[Line]
    comparable: bool
    runs: MadeRuns
    statistics: list[str]
    notes: list[str]
    unprinted: list[Line] = field(default_factory=list)

    @property
    def keys(self) -> str:
        """Keys of all its cards, each once."""
        return " ".join(dict.fromkeys(card.key for line in self.lines for card in line.cards))

    @property
    def legend(self) -> str:
        """Meaning of the marks of its lines; empty without any."""
        return legend_of(self.lines)

    @property
    def blocks(self) -> list[Block]:
        """Its lines by direction, in the order of the print."""
        directions = dict.fromkeys(line.published.direction for line in self.lines)
        return [
            Block(direction, [line for line in self.lines if line.published.direction == direction], self.columns)
            for direction in directions
        ]

    @property
    def columns(self) -> list[tuple[Printed, Column]]:
        """What every format shows of each line: of each metric what is printed and measured, of R@1 the difference."""
        shown: list[tuple[Printed, Column]] = []
        for metric in self.metrics:
            shown += [(metric, "published"), (metric, "measured")]
            shown += [(metric, "difference")] if self.comparable and metric == "R@1" else []
        return shown


def legend_of(lines: Iterable[Line]) -> str:
    """Return the meaning of the marks of lines as one sentence; empty without any."""
    found = {mark for line in lines for mark in line.warnings}
    meanings = "; ".join(f"{mark}: {meaning}" for mark, meaning in WARNINGS.items() if mark in found)
    return f"Warnings: {meanings}." if meanings else ""


def _warnings(results: dict[str, Any]) -> set[str]:
    """Return those of WARNINGS that hold for a run."""
    audit, warnings = results.get("audit"), results.get("warnings", [])
    held = {
        "leaks": LEAKS in warnings or bool(audit and audit["leaks"]),
        "not audited": audit is None or audit["problem"] is not None,
        "overridden": bool(results.get("weights", {}).get("overridden")),
        "synthetic": SYNTHETIC in warnings,
    }
    return {mark for mark, holds in held.items() if holds}


def field_of(record: object, path: str) -> object:
    """Return a field by its dotted path; None where it is not there.

    Args:
        record: an object or a mapping, such as a card.
        path: such as `results.text_to_video.R@1`.
    """
    for name in path.split("."):
        record = record.get(name) if isinstance(record, dict) else getattr(record, name, None)
    return record


def in_words(date: str) -> str:
    """Return a date of a card as people write it.

    Args:
        date: such as 2026-11-20T13:42:07+00:00.
    """
    found = datetime.fromisoformat(date).astimezone(UTC)
    return f"{found.day} {found:%B %Y, %H:%M} UTC"


def run_fields(record: object) -> dict[str, tuple[str, object]]:
    """Return what there is of RUN_FIELDS: words to the dotted path of the field and its value.

    Args:
        record: a card, or a mapping of the same fields.
    """
    found = {}
    for words, paths in RUN_FIELDS.items():
        path = next((path for path in paths if field_of(record, path) is not None), None)
        if path is not None:
            found[words] = path, field_of(record, path)
    return found


def view_table(table: TableRecipe, runs: MadeRuns, folder: Path) -> TableView:
    """Set a table's cards beside its printed lines.

    Args:
        table: with its printed lines.
        runs: by name in the table.
        folder: of the cards, for their ranks.
    """
    rows = table.published()
    shown = UNPRINTED if any(run.shows is not None for run in table.runs) else ()
    metrics = [name for name in PRINTED if name in shown or any(row.printed(name) is not None for row in rows)]
    synthetic, overlay = _circumstances(runs)
    run_of = {run.entry: run.name for run in table.runs}
    backbone_of = {run_of.get(row.entry): row.backbone for row in rows}
    lines = []
    for row in rows:
        line = Line(row, run_of.get(row.entry))
        line.cards = _finished(runs[line.run]) if line.run is not None else []
        # Not every line prints its backbone.
        baselines = {
            name: base
            for name in (table.baselines if line.run not in table.baselines else ())
            if len({backbone_of[name], row.backbone} - {None}) < 2 and (base := _finished(runs[name]))
        }
        for metric in metrics:
            line.cells[metric] = _cell(line, metric, baselines, not synthetic and overlay is None, folder)
        lines.append(line)
    number = table.table.replace("Fig", "Figure ") if table.table.startswith("Fig") else f"Table {table.table}"
    title = f"{rows[0].paper}, {number}"
    if synthetic:
        title += f" - {NOT_COMPARABLE}"
    if overlay is not None:
        title += f" - every run with the overlay {overlay}, not with the published settings"
    return TableView(
        name=table.name,
        title=title,
        metrics=metrics,
        lines=lines,
        comparable=not synthetic and overlay is None,
        runs=runs,
        statistics=[*_resolution(lines, folder), *_differences(lines)],
        notes=[*([table.note] if table.note else []), *_notes(lines, runs)],
        unprinted=_unprinted(lines, folder),
    )


def _unprinted(lines: Sequence[Line], folder: Path) -> list[Line]:
    printed = {(line.published.entry, line.published.direction) for line in lines}
    found = []
    for line in lines:
        for direction in DIRECTIONS:
            if (
                line.cards
                and line.published.direction in DIRECTIONS
                and (line.published.entry, direction) not in printed
            ):
                other = Line(unprinted_row(line.published.entry, direction), line.run, line.cards)
                other.cells = {metric: _cell(other, metric, {}, False, folder) for metric in ("R@1", "R@5", "R@10")}
                found.append(other)
    return found


def _circumstances(runs: MadeRuns) -> tuple[bool, str | None]:
    """Whether any run was made on synthetic data, and the recipe that was laid on top of any."""
    made = [pair for pairs in runs.values() for pair in pairs]
    synthetic = any(
        run.fixture_videos is not None or (card and SYNTHETIC in (card.results or {}).get("warnings", []))
        for run, card in made
    )
    overlays = [run.overlay["path"] for run, _ in made if run.overlay is not None]
    return synthetic, overlays[0] if overlays else None


def _cell(line: Line, metric: Printed, baselines: dict[str, list[Card]], comparable: bool, folder: Path) -> Cell:
    """A cell of a line, whose baseline is the one of those given that ranked the same queries."""
    published, direction = line.published.printed(metric), line.published.direction
    found = against = difference = None
    if line.cards and _belongs(metric, direction):
        found = measure(line.cards, folder, DIRECTIONS.get(direction or "", "text_to_video"), metric)
    if found is None:
        return Cell(published)
    for name, base in baselines.items():
        compared = compare_runs(base, line.cards, folder, DIRECTIONS.get(direction or "", "text_to_video"), metric)
        if compared is not None:
            line.baseline, against = name, compared
    if comparable and published is not None:
        interval = found.interval and replace(
            found.interval,
            estimate=found.interval.estimate - published,
            low=found.interval.low - published,
            high=found.interval.high - published,
        )
        difference = Measured(found.mean - published, None, interval, found.seeds)
    return Cell(published, found, difference, against)


def _belongs(metric: Printed, direction: str | None) -> bool:
    """Whether a row of a direction has a metric: SumR belongs to both directions, accuracy to none."""
    if direction in DIRECTIONS:
        return metric != "accuracy"
    return metric == ("accuracy" if direction is None else "SumR")


def _finished(runs: Sequence[tuple[PlannedRun, Card | None]]) -> list[Card]:
    return [card for _, card in runs if card is not None and card.status == "finished"]


def one_line(text: str) -> str:
    """Return the lines of a text behind one another, parted by slashes."""
    return " / ".join(part.strip() for part in text.splitlines() if part.strip())


def _shortened(text: str) -> str:
    words = one_line(text)
    return words if len(words) <= NOTE_LENGTH else words[:NOTE_LENGTH] + " ..."


def _resolution(lines: Sequence[Line], folder: Path) -> list[str]:
    said = []
    for direction, long in DIRECTIONS.items():
        # The same sentence for every line of one test set would repeat itself; its best recall gives one per set.
        best: dict[tuple[str | None, int, int], tuple[float, float]] = {}
        for line in lines:
            found = line.measured("R@1")
            if line.published.direction == direction and found is not None:
                queries, videos, worth = unrelated_queries(line.cards[0], folder, long)
                key = line.published.dataset, queries, videos
                best[key] = max(best.get(key, (found.mean, worth)), (found.mean, worth), key=lambda pair: pair[0])
        for (dataset, queries, videos), (recall, worth) in best.items():
            of_videos = f" on {videos} videos (effectively {worth:.0f} unrelated ones)" if videos < queries else ""
            said.append(
                f"{dataset or 'the test set'}, {direction}: {queries} queries{of_videos} resolve a difference of "
                f"{smallest_difference(recall, worth):.1f} points at R@1 {recall:.1f} (95 %, unrelated errors)"
            )
    return said


def _differences(lines: Sequence[Line]) -> list[str]:
    said = [
        f"{line.run} against {line.baseline}, {line.published.direction} R@1: {_comparison_words(found)}"
        for line in lines
        if "R@1" in line.cells and (found := line.cells["R@1"].against_baseline) is not None
    ]
    return [*dict.fromkeys(said), *(["Differences in the other metrics are in the table's CSV file"] if said else [])]


def _comparison_words(found: Comparison) -> str:
    """A paired difference in words: points, interval over queries, p-value."""
    d = found.difference
    verdict = "resolved" if d.low > 0 or d.high < 0 else "not resolved"
    return (
        f"{d.estimate:+.1f} [{d.low:+.1f}, {d.high:+.1f}] points, p {found.p_value:.2g}, paired over queries, {verdict}"
    )


def _notes(lines: Sequence[Line], runs: MadeRuns) -> list[str]:
    notes = []
    for line in lines:
        where = ", ".join(filter(None, line.names))
        notes += [f"Published, {where}: {remark}" for remark in line.published.remarks()]
    for name, made in runs.items():
        for _, card in made:
            if card is None:
                continue
            if card.status == "failed":
                notes.append(f"Run {name} FAILED (see {card.key}.json): {_shortened(card.error or '')}")
            results = card.results or {}
            notes += [
                f"Run {name}: {mark}" for mark in results.get("warnings", []) if mark != SYNTHETIC
            ]  # in the title
            if (audit := results.get("audit")) is not None and not audit["passed"]:
                notes.append(f"Run {name}: {Verdict(**audit)}")
            overridden = results.get("weights", {}).get("overridden", [])
            notes += [f"Run {name}: scored with another option than in training: {option}" for option in overridden]
            if results.get("partial"):
                notes.append(f"Run {name}: PARTIAL, not all texts and videos of the split were ranked")
            if results.get("transductive"):
                notes.append(f"Run {name}: {results['post_processing']} uses the whole test set")
            if results.get("skipped"):
                notes.append(f"Run {name}: skipped {len(results['skipped'])} files")
    notes += _test_sets(runs)
    notes += _shared(runs)
    if _circumstances(runs)[0]:
        notes.append(
            "The fixture's tiny encoder replaces every backbone, so rows with different backbones share one run"
        )
    return list(dict.fromkeys(notes))


def _test_sets(runs: MadeRuns) -> list[str]:
    """Return which test set each run ranks, for datasets of which runs of the table rank several."""
    sets: dict[str, dict[str, list[str]]] = {}
    for name, made in runs.items():
        for _, card in made:
            if card and (results := card.results):
                sets.setdefault(results["dataset"], {}).setdefault(results["protocol"], []).append(name)
    return [
        f"Test set of {', '.join(dict.fromkeys(names))} on {dataset}: {test_set}"
        for dataset, found in sets.items()
        if len(found) > 1
        for test_set, names in found.items()
    ]


def _shared(runs: MadeRuns) -> list[str]:
    """What runs on the fixture have in common, and how long they train."""
    planned = [run for made in runs.values() for run, _ in made]
    encoders = ", ".join(sorted({f"{run.encoder_from}.json" for run in planned if run.encoder_from}))
    epochs = sorted({card.epochs for made in runs.values() for _, card in made if card and card.epochs})
    trained = ", ".join(map(str, epochs)) or "no"
    shared = {run.share for run in planned}
    if "features" in shared:
        return [
            f"Heads are trained for {trained} epochs on the stored features of one frozen encoder: {encoders}; the "
            "effect of a method on its encoder is not included in these results",
            "Runs with other backbones are omitted, since the fixture has only one encoder",
        ]
    if "encoder" in shared:
        return [f"Every run trains for {trained} epochs, starting from the same trained encoder: {encoders}"]
    return []
