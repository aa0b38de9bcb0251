"""Steps per second of a complete `tvr fit` and time by part, compared with another revision of this package.

    git worktree add /tmp/before 8ed9ea1
    python benchmarks/whole_fit.py --before /tmp/before

Every fit is a separate process on a synthetic MSR-VTT, and the two revisions alternate. It trains a small CLIP from
video files (batch 48), or heads on stored features of that CLIP (batch 128), both with D = 512 and the recipe's
optimizer and dropout. Parts are wall-clock times of Lightning's simple profiler, averaged over all steps: waiting for
the loader, moving the batch to the device, `training_step` (encoders and losses), backward, the optimizer, and the rest
(Lightning and callbacks).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
METHODS = ("clip4clip", "gare", "xpool", "tcmgc")
ENCODER = {"width": 512, "vision_layers": 1, "text_layers": 4}
PARTS = ("waiting", "to the device", "encoders, losses", "backward", "optimizer", "rest")
ACTIONS = {
    "waiting": r"\[_TrainingEpochLoop\]\.train_dataloader_next",
    "to the device": r"\[Strategy\]\w+\.batch_to_device",
    "encoders, losses": r"\[Strategy\]\w+\.training_step",
    "backward": r"\[Strategy\]\w+\.backward",
    "optimizer": r"\[LightningModule\]\w+\.optimizer_step",
    "epoch": r"run_training_epoch",
}


def tvr(checkout: Path, work: Path, *arguments: str) -> None:
    """Run `tvr` of a checkout in a folder without another package of that name.

    Raises:
        RuntimeError: If the command fails. The message contains the end of its output.
    """
    start = "import sys; from tvr_lightning.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", start, *arguments], cwd=work, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"tvr {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def shared(checkout: Path, recipe: str, work: Path) -> list[str]:
    """Return the options that the fits and the extraction of a recipe share."""
    encoder = [text for key, value in ENCODER.items() for text in (f"--model.init_args.encoder.init_args.{key}", value)]
    recipes = checkout / "recipes"
    return [
        "--config", str(recipes / f"{recipe}.yaml"), "--config", str(recipes / "fixture.yaml"),
        *map(str, encoder), "--model.init_args.optimizer.name", "bert-adam",
        "--data.init_args.root", str(work / "data"), "--data.init_args.frames", "12",
        "--data.init_args.num_workers", "1",
    ]  # fmt: skip


def store_of(checkout: Path, recipe: str, work: Path) -> Path:
    """Return the folder of a recipe's stored features. Each recipe has an encoder with its own random weights."""
    return work / f"features-{checkout.name}-{recipe}"


def fit(checkout: Path, recipe: str, stored: bool, work: Path) -> dict[str, float]:
    """Return the mean seconds of every part of a step, and of the complete step as `step`."""
    profile = work / "profile"
    for old in profile.glob("*.txt"):
        old.unlink()
    given = ["--data.init_args.batch_size", "48"]
    if stored:
        given = ["--config", str(checkout / "recipes" / "heads.yaml"), "--data.init_args.batch_size", "128"]
        given += ["--data.init_args.features", str(store_of(checkout, recipe, work))]
    profiler = "--trainer.profiler"
    tvr(
        checkout, work, "fit", *shared(checkout, recipe, work), *given, "--trainer.max_epochs", "4" if stored else "1",
        "--trainer.limit_val_batches", "0", profiler, "lightning.pytorch.profilers.SimpleProfiler",
        f"{profiler}.init_args.filename", "parts", f"{profiler}.init_args.dirpath", str(profile),
    )  # fmt: skip
    report = (profile / "fit-parts.txt").read_text()
    found, count = {}, 1
    for part, action in ACTIONS.items():
        row = re.search(rf"\|\s+{action}\s*\|\s*([\d.e+-]+)\s*\|\s*(\d+)\s*\|\s*([\d.e+-]+)", report)
        if row is None:
            raise RuntimeError(f"{profile / 'fit-parts.txt'} has no row for {part}")
        found[part] = float(row[3])
        count = max(count, int(row[2]) if part == "optimizer" else 1)
    found["optimizer"] -= found["encoders, losses"] + found["backward"]  # it calls the closure
    found = {part: seconds / count for part, seconds in found.items()}
    found["step"] = found.pop("epoch")
    found["rest"] = found["step"] - sum(found[part] for part in PARTS[:-1])
    return found


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the revision to compare with")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="recipes")
    parser.add_argument("--sources", nargs="+", choices=("video", "stored"), default=["video", "stored"])
    parser.add_argument("--work", type=Path, default=Path("build/whole-fit"), help="folder for data and runs")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    work, checkouts = args.work.absolute(), {"before": args.before.absolute(), "now": HERE}
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "data").exists():
        tvr(HERE, work, "data", "synth", "msrvtt", "--root", str(work / "data"), "--videos", "720", "--seed", "0")
    print(f"{date.today()}, load {os.getloadavg()[0]:.1f}")
    for stored in (source == "stored" for source in args.sources):
        print(f"\n{'heads on stored features, batch 128' if stored else 'from video files, batch 48'}\n")
        print("| recipe | revision | steps/s | " + " | ".join(f"{part}, ms" for part in PARTS) + " |")
        print("|---|---|" + "---:|" * (len(PARTS) + 1))
        for recipe in args.methods:
            for checkout in checkouts.values():
                store = store_of(checkout, recipe, work)
                if stored and not store.exists():
                    heads = ["--config", str(checkout / "recipes" / "heads.yaml"), "--out", str(store)]
                    tvr(checkout, work, "extract", *shared(checkout, recipe, work), *heads)
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
            for _ in range(args.turns):
                for name, checkout in checkouts.items():
                    turns[name].append(fit(checkout, recipe, stored, work))
            for name, runs in turns.items():
                speed = "; ".join(f"{1 / run['step']:.2g}" for run in runs)
                parts = ["; ".join(f"{1000 * run[part]:.0f}" for run in runs) for part in PARTS]
                print(f"| {recipe} | {name} | {speed} | {' | '.join(parts)} |", flush=True)


if __name__ == "__main__":
    main()
