"""`tvr verify-released`: the authors' released checkpoints, measured and compared with their published results.

A larger difference than the rounding of one video in a thousand comes from this project: from reading, encoding,
scoring, or ranking.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvr_lightning.authors.convert import convert
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.errors import UserError
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.places import Folder
from tvr_lightning.progress import shown
from tvr_lightning.ranges import NotNegative, Workers
from tvr_lightning.reproduce.tables import load_table
from tvr_lightning.runs.run import RunCLI

TOLERANCE = 0.3
"""Maximum difference between measured and published R@1 in percentage points."""
SUFFIXES = (".bin", ".pth", ".pt", ".safetensors")
RELEASED = {
    "clip4clip": ("tc-mgc-1b", "clip4clip-seqTransf"),
    "xclip": ("tc-mgc-1b", "x-clip"),
    "xpool": ("tc-mgc-1b", "x-pool"),
    "drl": ("tc-mgc-1b", "drl"),
    "ucofia": ("tc-mgc-1b", "ucofia"),
    "gare": ("gare-1", "gare"),
    "tcmgc": ("tc-mgc-1b", "tc-mgc"),
    "tmass": ("gaid-1", "t-mass-as-released"),
    "gaid": ("gaid-1", "gaid-as-released"),
}
"""Published table and its run, by the name of the checkpoint, which is the method's."""


@dataclass
class ReleasedLine:
    """One line of the table, with R@1 in percent by direction."""

    method: str
    printed_in: str  # paper and table
    published: dict[str, float]
    measured: dict[str, float] = field(default_factory=dict)  # empty if nothing was measured
    remark: str = ""

    def differences(self) -> dict[str, float]:
        """Return measured minus published R@1 by direction."""
        return {name: self.measured[name] - value for name, value in self.published.items() if name in self.measured}


def run_verify_released(checkpoints: Folder, tolerance: NotNegative = TOLERANCE, num_workers: Workers = 2) -> int:
    """Evaluate the authors' released checkpoints on $TVR_DATA; the exit status is 1 if a result is not as published.

    Args:
        checkpoints: folder with the authors' files, named by method: xpool.pth, gare.bin, ...
        tolerance: maximum difference from the published R@1, in percentage points.
        num_workers: number of processes that decode.
    """
    if not os.environ.get("TVR_DATA"):
        raise UserError("The papers' test videos are required. Set TVR_DATA to their parent folder.")
    files = {
        name: next((path for suffix in SUFFIXES if (path := checkpoints / f"{name}{suffix}").is_file()), None)
        for name in RELEASED
    }
    if not any(files.values()):
        expected = ", ".join(RELEASED)
        raise UserError(
            f"{checkpoints} contains no checkpoint. Expected the authors' files, named by method ({expected}) with one "
            f"of the suffixes {', '.join(SUFFIXES)}."
        )
    lines = [_verified(name, file, num_workers) for name, file in files.items()]
    print("\n".join(table_of(lines)))
    failed = [line for line, file in zip(lines, files.values(), strict=True) if file is not None and not line.measured]
    apart = [line for line in lines if any(abs(value) > tolerance for value in line.differences().values())]
    if apart:
        print(f"\nMore than {tolerance} R@1 from the published result: {', '.join(line.method for line in apart)}")
    return 1 if failed or apart else 0


def table_of(lines: Sequence[ReleasedLine]) -> list[str]:
    """Return the lines of a Markdown table: published, measured, and difference per method and direction."""
    rows = [
        "| method | published in | direction | published R@1 | measured | difference | |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        for direction, published in line.published.items():
            measured = line.measured.get(direction)
            figures = "not measured | " if measured is None else f"{measured:.1f} | {measured - published:+.1f}"
            rows.append(
                f"| {line.method} | {line.printed_in} | {direction} | {published:.1f} | {figures} | {line.remark} |"
            )
    return rows


def _verified(name: str, file: Path | None, workers: int) -> ReleasedLine:
    table_name, run_name = RELEASED[name]
    table = load_table(table_name, RECIPES)
    run = next(run for run in table.runs if run.name == run_name)
    rows = [row for row in table.published() if row.entry == run.entry and row.recall_1 is not None]
    published = {str(row.direction): float(row.recall_1 or 0) for row in rows}
    line = ReleasedLine(name, f"{table.paper}, Table {table.table}", published)
    if file is None:
        line.remark = "no checkpoint"
        return line
    try:
        with shown(f"verify-released: testing {file.name}"):
            method = measure(name, file, workers)
    except UserError as error:
        line.remark = " ".join(str(error).split())
        return line
    evaluation = method.evaluation
    assert evaluation is not None  # of the test that has just ended
    line.measured = {"t2v": evaluation.text_to_video["R@1"], "v2t": evaluation.video_to_text["R@1"]}
    line.remark = "; ".join([*evaluation.warnings, *(["PARTIAL"] if evaluation.partial else []), "not audited"])
    return line


def measure(name: str, file: Path, workers: int) -> RetrievalModule:
    """Convert an authors' checkpoint, test it as `tvr test` does, and return the method with its evaluation.

    Raises:
        UserError: The checkpoint belongs to another method or is unreadable, or videos or weights are missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        converted = convert(file, Path(folder) / f"{name}.ckpt", method=name).path
        options = [f"--ckpt_path={converted}", f"--results.directory={folder}", "--trainer.devices=1"]
        tested = RunCLI(["test", *options, f"--data.init_args.num_workers={workers}"])
    method: RetrievalModule = tested.model
    return method
