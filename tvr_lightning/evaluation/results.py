"""Results of a run: one record of the results table and its conditions, printed and written to files."""

from __future__ import annotations

import csv
import io
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from tvr_lightning.evaluation.audit_result import NOT_AUDITABLE, NOT_AUDITED, AuditResult
from tvr_lightning.evaluation.evaluator import Evaluation
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.files import write_whole

SelectOn = Literal["last", "val", "test"]
PACKAGES = (
    "tvr-lightning", "torch", "torchvision", "lightning", "torchmetrics", "open_clip_torch", "av", "librosa",
    "openai-whisper", "pandas", "jsonargparse", "numpy", "safetensors", "pyarrow",
)  # fmt: skip


@dataclass
class Results:
    """Results and conditions of one evaluated run.

    Attributes:
        method, dataset, split, protocol: evaluated method, data and protocol.
        text_to_video, video_to_text: metric name to value, R@K in percent.
        sum_of_recalls: SumR, the sum of all R@K of both directions.
        texts, videos: number of texts and videos that were ranked.
        partial: True if some texts or videos of the split were not ranked (limited batches, skipped files).
        post_processing: name of the score normalization, or None.
        transductive: True if the post-processing uses the test set as a whole, as measured if there was an audit.
        warnings: conditions that limit comparisons with other results, such as "leaks ground truth".
        trained_on: training dataset of the weights, if the checkpoint records it.
        weights: origin of the weights according to their checkpoint.
        select_on: split that selected the weights; `last` if none did (weights of the last step), None if unknown.
        checkpoint: file of the evaluated weights, if any.
        skipped: files that could not be read, each with its reason.
        config: resolved configuration.
        precision, seed: precision and seed of the run.
        balance: per direction, if measured: the normalization error, and the rates of false negatives and false
            positives in bins of retrieval mass (NCL, Eq. 5 and Fig. 3).
        measured: values reported by the post-processing, by name, in percent.
        intervals: per direction and metric, if computed: `low` and `high` of the 95 % bootstrap interval over queries.
        audit: result of the leakage audit, with the fields of `AuditResult`; None if there was no audit.
        preprocessing: preparation of captions and frames: token positions requested and used, frame transform; `data`
            if the videos were copies made by `tvr data compress`.
        environment: package versions, git revision, machine, command and date.
    """

    method: str
    dataset: str
    split: str
    protocol: str
    text_to_video: dict[str, float]
    video_to_text: dict[str, float]
    sum_of_recalls: float
    texts: int
    videos: int
    partial: bool
    post_processing: str | None
    transductive: bool
    warnings: list[str]
    select_on: SelectOn | None
    checkpoint: str | None
    skipped: list[str]
    config: dict[str, Any]
    precision: str
    seed: int | None
    weights: Weights = field(default_factory=lambda: Weights("unknown"))
    trained_on: str | None = None
    balance: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    audit: dict[str, Any] | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=lambda: environment())
    schema: int = 1

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per direction for the CSV file."""
        common = {
            "method": self.method,
            "dataset": self.dataset,
            "trained_on": self.trained_on or "",
            "protocol": self.protocol,
            "weights": self.weights.kind,
            "select_on": self.select_on or "",
            "post_processing": self.post_processing or "",
            "transductive": self.transductive,
        }
        return [
            {**common, "direction": direction, **values, "SumR": self.sum_of_recalls}
            for direction, values in (("text-to-video", self.text_to_video), ("video-to-text", self.video_to_text))
        ]


def environment() -> dict[str, Any]:
    """Return package versions, git revision, machine, command and date."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git_state(Path(__file__)),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads"
        + "".join(f", {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(file: Path) -> dict[str, Any] | None:
    """Return the revision of the repository that tracks a file and a flag for uncommitted changes, or None."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    tracked = git("ls-files", "--error-unmatch", file.name) is not None  # environments may be in a repository
    if revision is None or not tracked:
        return None
    return {"revision": revision, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def results_of(
    evaluation: Evaluation,
    *,
    method: str,
    select_on: SelectOn | None,
    checkpoint: str | None,
    skipped: list[str],
    config: dict[str, Any],
    precision: str,
    seed: int | None,
    weights: Weights | None = None,
    trained_on: str | None = None,
    preprocessing: dict[str, Any] | None = None,
) -> Results:
    """Combine an evaluation with the conditions of its run."""
    seen = evaluation.audit.transductive if evaluation.audit else {}
    return Results(
        method=method,
        dataset=evaluation.dataset,
        split=evaluation.split,
        protocol=evaluation.protocol,
        text_to_video=evaluation.text_to_video,
        video_to_text=evaluation.video_to_text,
        sum_of_recalls=evaluation.sum_of_recalls,
        texts=evaluation.texts,
        videos=evaluation.videos,
        partial=evaluation.partial,
        post_processing=evaluation.post_processing,
        transductive=any(seen.values()) if seen else evaluation.transductive,
        warnings=list(evaluation.warnings),
        select_on=select_on,
        checkpoint=checkpoint,
        skipped=skipped,
        config=config,
        precision=precision,
        seed=seed,
        weights=weights or Weights("unknown"),
        trained_on=trained_on,
        balance={direction: found.plain() for direction, found in evaluation.balance.items()},
        measured=evaluation.measured,
        audit=asdict(evaluation.audit) if evaluation.audit else None,
        preprocessing=preprocessing or {},
    )


def write_results(results: Results, folder: Path) -> tuple[Path, Path]:
    """Write `results.json` (everything) and `results.csv` (one row per direction) to `folder` and return both paths."""
    return write_json_and_csv(asdict(results), results.rows(), folder)


def write_json_and_csv(record: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Write a record as `results.json` and its rows as `results.csv` to `folder` and return both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json_path, csv_path = folder / "results.json", folder / "results.csv"
    write_whole(json_path, (json.dumps(record, indent=2) + "\n").encode())
    table = io.StringIO()
    writer = csv.DictWriter(table, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(csv_path, table.getvalue().encode())
    return json_path, csv_path


def print_results(results: Results, console: Console | None = None) -> None:
    """Print the results table, followed by notes on protocol, weights, skipped files and warnings."""
    console = console or Console()
    table = Table(title=f"{results.method} on {results.dataset} ({results.protocol})")
    table.add_column("direction")
    for name in results.text_to_video:
        table.add_column(name, justify="right")
    for row in results.rows():
        table.add_row(row["direction"], *[f"{row[name]:.1f}" for name in results.text_to_video])
    console.print(table)
    for line in captions(results):
        console.print(line, highlight=False, soft_wrap=True)


def captions(results: Results) -> list[str]:
    """Return the lines below the table: what was ranked, the weights, and warnings."""
    lines = [
        f"SumR {results.sum_of_recalls:.1f} · {results.texts} texts, {results.videos} videos",
        results.weights.caption(),
    ]
    if "data" in results.preprocessing:
        lines.append(f"data: {results.preprocessing['data']}")
    if results.trained_on and results.trained_on != results.dataset:
        lines.append(f"Cross-domain: trained on {results.trained_on}, tested on {results.dataset}")
    if results.post_processing:
        seen = "uses the whole test set" if results.transductive else "uses no other test query"
        how = "measured" if results.audit and results.audit["transductive"] else "as declared"
        lines.append(f"Post-processing: {results.post_processing} ({seen}, {how})")
    lines.extend(f"{name.capitalize()}: {value:.1f} %" for name, value in results.measured.items())
    if results.balance:
        errors = ", ".join(f"{name} {found['normalization_error']:.3f}" for name, found in results.balance.items())
        lines.append(f"Normalization error (0: all items are retrieved equally often): {errors}")
    for direction, found in results.intervals.items():
        shown = ", ".join(f"{name} [{ends['low']:.1f}, {ends['high']:.1f}]" for name, ends in found.items())
        lines.append(f"95 % intervals over queries, {direction}: {shown}")
    if results.weights.kind == "outside":
        lines.append(NOT_AUDITABLE)
    else:
        lines.append(NOT_AUDITED if results.audit is None else str(AuditResult(**results.audit)))
    if results.partial:
        lines.append("PARTIAL: not all texts and videos of the split were ranked; not comparable with other results")
    lines.extend(f"Warning: {mark}" for mark in [*results.warnings, *results.weights.warnings()])
    if results.skipped:
        lines.append(f"Skipped {len(results.skipped)} files: " + "; ".join(results.skipped[:5]))
    return lines
