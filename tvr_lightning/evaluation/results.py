"""What a run leaves behind: one record of its table and of everything the table depends on, printed and written."""

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

from tvr_lightning.evaluation.evaluator import Evaluation
from tvr_lightning.evaluation.verdict import NOT_AUDITABLE, NOT_AUDITED, Verdict
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.files import write_whole

SelectOn = Literal["last", "val", "test"]
PACKAGES = (
    "tvr-lightning", "torch", "torchvision", "lightning", "torchmetrics", "open_clip_torch", "av", "librosa",
    "openai-whisper", "pandas", "jsonargparse", "numpy", "safetensors", "pyarrow",
)  # fmt: skip


@dataclass
class Results:
    """One evaluated run.

    Attributes:
        method, dataset, split, protocol: what was evaluated, and by which protocol.
        text_to_video, video_to_text: metric name to value, R@K in percent.
        sum_of_recalls: SumR, the sum of all R@K of both directions.
        texts, videos: how many were ranked.
        partial: some texts or videos of the split were not ranked (limited batches, skipped files).
        post_processing: name of the score normalisation, or None.
        transductive: whether the post-processing saw the test set as a whole, as measured where there was an audit.
        warnings: what a reader must know before comparing, such as "leaks ground truth".
        trained_on: the dataset whose training split made the weights, where the checkpoint says so.
        weights: which weights these are, as their checkpoint says.
        select_on: which split chose them: `last` is none, the weights of the last step; None where nobody says.
        checkpoint: file of the evaluated weights, if any.
        skipped: files that could not be read, each with its reason.
        config: the resolved configuration.
        precision, seed: of the run.
        balance: per direction, where it was measured: the normalisation error, and the rates of false negatives and
            false positives in bins of retrieval mass (NCL, Eq. 5 and Fig. 3).
        measured: what the post-processing has to say of itself, by name, in percent.
        intervals: per direction and metric, where they were drawn: `low` and `high` of the 95 % bootstrap interval over
            queries.
        audit: verdict of the audit for leakage, as `Verdict` has it; None where there was none.
        preprocessing: how captions and frames reached the encoder: token positions requested and used, preparation;
            `data` if the videos were copies of `tvr data compress`.
        environment: package versions, git revision, machine, command, date.
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
        """Return one flat row per direction, as the CSV file has them."""
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
    """Describe what the numbers were made with: versions, git revision, machine, command, date."""
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
    """Return the revision of the repository that tracks a file, and whether it has changes; otherwise None."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=10)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    tracked = git("ls-files", "--error-unmatch", file.name) is not None  # a virtual environment may lie in a repository
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
    """Join an evaluation with what it depends on."""
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
    """Write `results.json` (everything) and `results.csv` (one row per direction) into `folder`; return both paths."""
    return write_json_and_csv(asdict(results), results.rows(), folder)


def write_json_and_csv(record: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Write a record as `results.json` and its rows as `results.csv` into `folder`; return both paths."""
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
    """Print the table that closes a run, with protocol, selection rule, skipped files and warnings under it."""
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
    """Return the sentences under a table: what was ranked, which weights did it, what to be careful about."""
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
        lines.append(NOT_AUDITED if results.audit is None else str(Verdict(**results.audit)))
    if results.partial:
        lines.append("PARTIAL: not all texts and videos of the split were ranked; not comparable with other results")
    lines.extend(f"Warning: {mark}" for mark in [*results.warnings, *results.weights.warnings()])
    if results.skipped:
        lines.append(f"Skipped {len(results.skipped)} files: " + "; ".join(results.skipped[:5]))
    return lines
