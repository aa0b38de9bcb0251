"""Results and predictions of a run: the results table and its conditions, printed and written to files."""

import json
import os
import platform
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from tvr_lightning.data.records import Split
from tvr_lightning.evaluation.audit_result import NOT_AUDITED, AuditResult
from tvr_lightning.evaluation.evaluator import Evaluation, RetrievalTable
from tvr_lightning.evaluation.intervals import MEANING, TRANSDUCTIVE
from tvr_lightning.evaluation.weights import Weights
from tvr_lightning.files import write_whole

SelectOn = Literal["last", "val", "test"]
PACKAGES = (
    "tvr-lightning", "torch", "torchvision", "lightning", "torchmetrics", "open_clip_torch", "av", "librosa",
    "openai-whisper", "pandas", "jsonargparse", "numpy", "safetensors", "pyarrow",
)  # fmt: skip


@dataclass(kw_only=True)
class RunResults(ABC):
    """Results and conditions of one evaluated run.

    Attributes:
        method, dataset, split, protocol: evaluated method, data and protocol.
        select_on: split that selected the weights; `last` if none did (weights of the last step), None if unknown.
        checkpoint: file of the evaluated weights, if any.
        skipped: files that could not be read, each with its reason.
        config: resolved configuration.
        precision, seed: precision and seed of the run.
        weights: origin of the weights according to their checkpoint.
        trained_on: training dataset of the weights, if the checkpoint records it.
        warnings: conditions that limit comparisons with other results, such as "leaks ground truth".
        preprocessing: preparation of captions and frames: token positions requested and used, frame transform; `data`
            if the videos were copies made by `tvr data compress`.
        environment: package versions, git revision, machine, command and date.
    """

    method: str
    dataset: str
    split: str
    protocol: str
    select_on: SelectOn | None
    checkpoint: str | None
    skipped: list[str]
    config: dict[str, Any]
    precision: str
    seed: int | None
    weights: Weights = field(default_factory=lambda: Weights("unknown"))
    trained_on: str | None = None
    warnings: list[str] = field(default_factory=list)
    preprocessing: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=lambda: environment())  # noqa: PLW0108  defined below
    schema: int = 1

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the CSV file."""

    @abstractmethod
    def table(self) -> dict[str, list[str]]:
        """Return the cells of the printed table, a column for each heading."""

    @abstractmethod
    def notes(self) -> list[str]:
        """Return the lines below the table, beginning with the number of evaluated items."""


@dataclass(kw_only=True)
class Results(RetrievalTable, RunResults):
    """Results and conditions of one evaluated run of retrieval.

    Attributes:
        balance: per direction, if measured: the normalization error, and the rates of false negatives and false
            positives in bins of retrieval mass (NCL, Eq. 5 and Fig. 3).
        audit: result of the leakage audit, with the fields of `AuditResult`; None if there was no audit. Its finding
            determines `transductive`.
    """

    balance: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] | None = None

    @override
    def rows(self) -> list[dict[str, Any]]:
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

    @override
    def table(self) -> dict[str, list[str]]:
        metrics = {name: [f"{row[name]:.1f}" for row in self.rows()] for name in self.text_to_video}
        return {"direction": [row["direction"] for row in self.rows()], **metrics}

    @override
    def notes(self) -> list[str]:
        lines = [f"SumR {self.sum_of_recalls:.1f} · {self.texts:,} texts, {self.videos:,} videos"]
        if self.post_processing:
            seen = "uses the whole test set" if self.transductive else "uses no other test query"
            how = "measured" if self.audit and self.audit["transductive"] else "as declared"
            lines.append(f"Post-processing: {self.post_processing} ({seen}, {how})")
        for name, value in self.measured.items():
            amount = f"{value:.4g}" if name.endswith(")") else f"{value:.1f} %"
            lines.append(f"{name.capitalize()}: {amount}")
        if self.balance:
            errors = ", ".join(f"{name} {found['normalization_error']:.3f}" for name, found in self.balance.items())
            lines.append(f"Normalization error (0: all items are retrieved equally often): {errors}")
        for direction, found in self.intervals.items():
            shown = ", ".join(f"{name} [{ends['low']:.1f}, {ends['high']:.1f}]" for name, ends in found.items())
            lines.append(f"95 % intervals, {direction}: {shown}")
        if self.intervals:
            lines.append(MEANING + (f" {TRANSDUCTIVE}" if self.transductive else ""))
        if self.weights.kind == "outside":
            lines.append("Leakage: cannot be audited, since the scores are external")
        else:
            lines.append(NOT_AUDITED if self.audit is None else str(AuditResult(**self.audit)))
        if self.partial:
            lines.append(
                "PARTIAL: not all texts and videos of the split were ranked; not comparable with other results"
            )
        return lines


def results_of(evaluation: Evaluation, **run: Any) -> Results:
    """Combine an evaluation with the conditions of its run, the other attributes of `RunResults`."""
    table = {field.name: getattr(evaluation, field.name) for field in fields(RetrievalTable)}
    if evaluation.audit and evaluation.audit.transductive:
        table["transductive"] = any(evaluation.audit.transductive.values())
    balance: Any = {direction: found.plain() for direction, found in evaluation.balance.items()}
    audit = asdict(evaluation.audit) if evaluation.audit else None
    return Results(**table, balance=balance, audit=audit, **run)


def write_results(results: RunResults, folder: Path) -> tuple[Path, Path]:
    """Write `results.json` (everything) and `results.csv` (the table) to `folder` and return both paths."""
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    json_path, csv_path = folder / "results.json", folder / "results.csv"
    write_whole(json_path, (json.dumps(asdict(results), indent=2) + "\n").encode())
    table = pd.DataFrame(results.rows()).to_csv(index=False, na_rep="nan", lineterminator="\r\n")
    write_whole(csv_path, table.encode())
    return json_path, csv_path


def write_predictions(path: Path, split: Split, text_index: Tensor, scores: Tensor, video_index: Tensor) -> None:
    """Write a Parquet file with one row per text and place, the correct video and its place (empty if not found).

    Texts (N,) and videos (N, k) are given by their indices in the split, with descending scores (N, k).
    """
    import pandas as pd

    n, k = scores.shape
    video_ids = [video.video_id for video in split.videos]
    index_of_row = text_index.repeat_interleave(k).tolist()
    texts = [split.texts[index] for index in index_of_row]
    frame = pd.DataFrame(
        {
            "text_index": index_of_row,
            "text": [text.text for text in texts],
            "place": list(range(1, k + 1)) * n,
            "video_id": [video_ids[index] for index in video_index.flatten().tolist()],
            "score": scores.flatten().tolist(),
            "correct_video_id": [video_ids[text.video] for text in texts],
        }
    )
    correct = frame[frame["video_id"] == frame["correct_video_id"]].set_index("text_index")["place"]
    frame["correct_place"] = frame["text_index"].map(correct).astype("Int64")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, frame.to_parquet(index=False))


def print_results(results: RunResults) -> None:
    """Print the results table, followed by notes on protocol, weights, skipped files and warnings."""
    console = Console(markup=False, emoji=False, highlight=False)  # names of files can contain brackets
    table = Table(title=f"{results.method} on {results.dataset} ({results.protocol})")
    columns = results.table()
    for name in columns:
        table.add_column(name, justify="left" if name == "direction" else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    for line in captions(results):
        console.print(line, soft_wrap=True)


def captions(results: RunResults) -> list[str]:
    """Return the lines below the table: what was evaluated, the weights, and warnings."""
    counts, *notes = results.notes()
    lines = [counts, results.weights.caption()]
    if "data" in results.preprocessing:
        lines.append(f"data: {results.preprocessing['data']}")
    if results.trained_on and results.trained_on != results.dataset:
        lines.append(f"Cross-domain: trained on {results.trained_on}, tested on {results.dataset}")
    lines += notes
    changed = [f"scored with another option than in training: {option}" for option in results.weights.overridden]
    lines.extend(f"Warning: {warning}" for warning in [*results.warnings, *changed])
    if results.skipped:
        lines.append(f"Skipped {len(results.skipped)} files: " + "; ".join(results.skipped[:5]))
    return lines


def environment() -> dict[str, Any]:
    """Return package versions, git revision, machine, command and date."""
    installed = {name: next(iter(metadata.distributions(name=name)), None) for name in PACKAGES}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    program = "tvr" if Path(sys.argv[0]).name in ("tvr", "__main__.py") else sys.argv[0]
    path = [f"PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])}"] if os.environ.get("PYTHONPATH") else []
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([*path, shlex.join([program, *sys.argv[1:]])]),
        "python": platform.python_version(),
        "packages": {name: found and found.version for name, found in installed.items()},
        "git": git_state(Path(__file__)),
        "machine": ", ".join([platform.machine(), f"{torch.get_num_threads()} threads", *gpus]),
    }


def git_state(file: Path) -> dict[str, Any] | None:
    """Return the revision of the repository that tracks a file and a flag for uncommitted changes, or None."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=file.parent, check=False, capture_output=True, text=True, timeout=10
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = git("rev-parse", "HEAD")
    tracked = git("ls-files", "--error-unmatch", file.name) is not None  # environments may be in a repository
    if revision is None or not tracked:
        return None
    return {"revision": revision, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
