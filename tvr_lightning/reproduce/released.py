"""`tvr verify-released`: the authors' released checkpoints, measured and compared with their published results.

A larger difference than the rounding of one video in a thousand comes from this project: from reading, encoding,
scoring, or ranking.
"""

import math
import tempfile
from pathlib import Path

import pandas as pd

from tvr_lightning.authors.convert import convert
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.errors import UserError
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.progress import shown
from tvr_lightning.reproduce.report.table_view import markdown_table
from tvr_lightning.reproduce.tables import load_table
from tvr_lightning.runs.run import Run

SUFFIXES = (".bin", ".pth", ".pt", ".safetensors")
RELEASED = {  # published table and its run, by the name of the checkpoint, which is the method's
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
COLUMNS = ["method", "published in", "direction", "published R@1", "measured", "difference", "remark"]


def verify(checkpoints: Path, tolerance: float, num_workers: int) -> int:
    """Evaluate the authors' checkpoints in a folder, and print the comparison; return 1 if a result differs."""
    files = {
        name: next((path for suffix in SUFFIXES if (path := checkpoints / f"{name}{suffix}").is_file()), None)
        for name in RELEASED
    }
    if not any(files.values()):
        raise UserError(
            f"{checkpoints} contains no checkpoint. Expected the authors' files, named by method "
            f"({', '.join(RELEASED)}) with one of the suffixes {', '.join(SUFFIXES)}."
        )
    table = pd.concat([_verified(name, file, num_workers) for name, file in files.items()], ignore_index=True)
    table["difference"] = table["measured"] - table["published R@1"]
    texts = {
        "published R@1": table["published R@1"].map("{:.1f}".format),
        "measured": table["measured"].map("{:.1f}".format).replace("nan", "not measured"),
        "difference": table["difference"].map("{:+.1f}".format).replace("+nan", ""),
    }
    print(markdown_table(table[COLUMNS].assign(**texts)))
    failed = table["method"].map(files).notna() & table["measured"].isna()
    apart = table[table["difference"].abs() > tolerance]["method"].unique()
    if len(apart):
        print(f"\nMore than {tolerance} R@1 from the published result: {', '.join(apart)}")
    return int(failed.any() or len(apart) > 0)


def _verified(name: str, file: Path | None, workers: int) -> pd.DataFrame:
    """Return the published and the measured R@1 of a method in percent, one row per direction."""
    table_name, run_name = RELEASED[name]
    table = load_table(table_name, RECIPES)
    run = next(run for run in table.runs if run.name == run_name)
    rows = [row for row in table.rows if row.entry == run.entry and row.recall_1 is not None]
    common = {"method": name, "published in": f"{table.paper}, Table {table.table}", "measured": math.nan}
    found = pd.DataFrame([{**common, "direction": row.direction, "published R@1": row.recall_1} for row in rows])
    if file is None:
        return found.assign(remark="no checkpoint")
    try:
        with shown(f"verify-released: testing {file.name}"):
            evaluation = measure(name, file, workers).evaluation
    except UserError as error:
        return found.assign(remark=" ".join(str(error).split()))
    assert evaluation is not None  # of the test that has just ended
    recalls = {"t2v": evaluation.text_to_video["R@1"], "v2t": evaluation.video_to_text["R@1"]}
    remark = "; ".join([*evaluation.warnings, *(["PARTIAL"] if evaluation.partial else []), "not audited"])
    return found.assign(measured=found["direction"].map(recalls), remark=remark)


def measure(name: str, file: Path, workers: int) -> RetrievalModule:
    """Convert an authors' checkpoint, test it as `tvr test` does, and return the method with its evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / f"{name}.ckpt"
        convert(file, converted, method=name)
        options = [f"--results.directory={folder}", "--trainer.devices=1", f"--data.init_args.num_workers={workers}"]
        run = Run("test", Recipe.parse([], options, converted), str(converted), options)
        run.start()
    method: RetrievalModule = run.model
    return method
