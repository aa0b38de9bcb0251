"""The authors' released checkpoints, measured and set beside what is printed of them.

A checkpoint is the whole of what a paper's code trained, so that a difference beyond the rounding of one video in a
thousand is this project's: in reading videos, in encoding, in scoring or in ranking.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvr_lightning.authors.convert import convert
from tvr_lightning.errors import UserError
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.places import Folder
from tvr_lightning.progress import shown
from tvr_lightning.ranges import NotNegative, Workers
from tvr_lightning.recipe_files import RECIPES
from tvr_lightning.reproduce.tables import load_table
from tvr_lightning.run import RunCLI

TOLERANCE = 0.3
"""R@1 in percent that a measured number may differ from the printed one."""
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
"""By the name of the checkpoint, which is the method's: the published table and the run in it that stand for it."""


class ReleasedError(UserError, ValueError):
    """There are no checkpoints or data to verify; says what is expected where."""


@dataclass
class Line:
    """One line of the table.

    Attributes:
        method: its name.
        printed_in: paper and table.
        published: R@1 in percent by direction, where it is printed.
        measured: R@1 in percent by direction; empty where nothing was measured.
        remark: why nothing was measured, or what to know of the number.
    """

    method: str
    printed_in: str
    published: dict[str, float]
    measured: dict[str, float] = field(default_factory=dict)
    remark: str = ""

    def differences(self) -> dict[str, float]:
        """Return measured less published R@1, by direction."""
        return {name: self.measured[name] - value for name, value in self.published.items() if name in self.measured}


def run_verify_released(checkpoints: Folder, tolerance: NotNegative = TOLERANCE, num_workers: Workers = 2) -> int:
    """Evaluate the authors' released checkpoints on $TVR_DATA; the exit status is 1 if a result is not as published.

    Args:
        checkpoints: folder with the authors' files, named by method: xpool.pth, gare.bin, ...
        tolerance: maximum difference from the published R@1, in percentage points.
        num_workers: number of processes that decode.
    """
    if not os.environ.get("TVR_DATA"):
        raise ReleasedError("The papers' test videos are required. Set TVR_DATA to their parent folder.")
    files = {name: _file(checkpoints, name) for name in RELEASED}
    if not any(files.values()):
        expected = ", ".join(RELEASED)
        raise ReleasedError(
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


def table_of(lines: Sequence[Line]) -> list[str]:
    """Return the table as lines of markdown: published, measured and difference, per method and direction."""
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


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}{suffix}" for suffix in SUFFIXES) if path.is_file()), None)


def _verified(name: str, file: Path | None, workers: int) -> Line:
    table_name, run_name = RELEASED[name]
    table = load_table(table_name, RECIPES)
    run = next(run for run in table.runs if run.name == run_name)
    rows = [row for row in table.published() if row.entry == run.entry and row.recall_1 is not None]
    published = {str(row.direction): float(row.recall_1 or 0) for row in rows}
    line = Line(name, f"{table.paper}, Table {table.table}", published)
    if file is None:
        line.remark = "no checkpoint"
        return line
    try:
        with shown(f"verify-released: testing {file.name}"):
            method = measure(name, file, workers)
    except (UserError, ValueError) as error:
        line.remark = " ".join(str(error).split())
        return line
    evaluation = method.evaluation
    assert evaluation is not None  # of the test that has just ended
    line.measured = {"t2v": evaluation.text_to_video["R@1"], "v2t": evaluation.video_to_text["R@1"]}
    line.remark = "; ".join([*evaluation.warnings, *(["PARTIAL"] if evaluation.partial else []), "not audited"])
    return line


def measure(name: str, file: Path, workers: int) -> RetrievalModule:
    """Convert an authors' checkpoint, test it as `tvr test` does, and return the method with its evaluation.

    Args:
        name: Method that the checkpoint must belong to.
        file: the authors' checkpoint.
        workers: processes that decode.

    Raises:
        UserError: another method's checkpoint, or no readable one.
        MissingAssetError: the videos are absent, or weights that the authors' checkpoint does not hold.
    """
    with tempfile.TemporaryDirectory() as folder:
        converted = convert(file, Path(folder) / f"{name}.ckpt", method=name).path
        options = [f"--ckpt_path={converted}", f"--results.directory={folder}", "--trainer.devices=1"]
        tested = RunCLI(["test", *options, f"--data.init_args.num_workers={workers}"])
    method: RetrievalModule = tested.model
    return method
