"""Reading speed, PSNR, and size of the copies that `tvr data compress` makes of a folder of clips.

    python benchmarks/compress.py FOLDER                  # 3 frames per second, 224 pixels, both kinds of copies
    python benchmarks/compress.py FOLDER --runs RUNS      # also SumR of runs that were trained on originals and copies

Reading takes 12 frames of a clip, as in training. Each file is read twice, and the CPU time of the second reading
counts. `--runs` takes the parent of results folders named `runs-<arm>-<seed>`, and compares each arm with the originals
by seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from scipy import stats

import tvr_lightning  # noqa: F401  first, see tvr_lightning._torchvision
from tvr_lightning.errors import UserError
from tvr_lightning.media.compression import Compression, compress, verify_copy
from tvr_lightning.media.container import VIDEO_SUFFIXES
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import DecodedClip, read_clip


def read(path: Path, size: int) -> tuple[DecodedClip, float]:
    """Return a clip of 12 frames and the CPU time of its second reading."""
    for _ in range(2):
        start = time.process_time()
        clip = read_clip(path, frames=12, prepare=Preparation(size))
        seconds = time.process_time() - start
    return clip, seconds


def measure(files: list[Path], how: Compression) -> str:
    """Return a row of the table: clips per second, PSNR in decibels, size, and copies made per second."""
    before, after, decibels, sizes, making = [], [], [], [0, 0], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for path in files:
            start = time.process_time()
            made = compress(path, how)
            copy = Path(folder) / "copy.mp4"
            copy.write_bytes(made.content)
            verify_copy(copy, made)
            making += time.process_time() - start
            one, seconds = read(path, how.size)
            other, fewer = read(copy, how.size)
            before.append(seconds)
            after.append(fewer)
            shown = one.frame_mask & other.frame_mask
            error = (one.pixels[shown].double() - other.pixels[shown].double()).square().mean((1, 2, 3))
            decibels += (10 * torch.log10(255**2 / error.clamp(min=1e-9))).tolist()
            sizes[0] += path.stat().st_size
            sizes[1] += len(made.content)
    return (
        f"| {how.describe()} | {len(before) / sum(before):.1f} | {len(after) / sum(after):.1f} | "
        f"{statistics.median(a / b for a, b in zip(before, after, strict=True)):.1f} | {np.median(decibels):.1f} | "
        f"{np.percentile(decibels, 10):.1f} | {sizes[1] / sizes[0]:.2f} | {len(files) / making:.1f} |"
    )


def readable(files: list[Path]) -> list[Path]:
    """Return the files that can be copied, and print the names of the others."""
    kept = []
    for path in files:
        try:
            compress(path, Compression(1, 32))
            kept.append(path)
        except UserError as error:
            print(f"skipped: {error}")
    return kept


def compare(runs: Path) -> None:
    """Print SumR by arm and seed, and each arm's difference from the originals with its 95 % interval over seeds."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(runs.glob("runs-*-*/*/version_0/results.json")):
        arm, _, seed = path.parts[len(runs.parts)].removeprefix("runs-").rpartition("-")
        record = json.loads(path.read_text())
        found.setdefault(record["preprocessing"].get("data", "originals"), {})[int(seed)] = record["sum_of_recalls"]
    print("\n| trained and tested on | SumR by seed | mean | difference from originals, 95 % |\n|---|---|---:|---:|")
    first = found["originals"]
    for arm, sums in sorted(found.items(), key=lambda item: item[0] != "originals"):
        each = ", ".join(f"{sums[seed]:.1f}" for seed in sorted(sums))
        differences = [sums[seed] - first[seed] for seed in sorted(sums) if seed in first]
        shown = "-"
        if arm != "originals" and len(differences) > 1:
            half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
            mean = statistics.mean(differences)
            shown = f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"
        print(f"| {arm} | {each} | {statistics.mean(sums.values()):.1f} | {shown} |")


def main() -> int:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of videos")
    parser.add_argument("--every", type=int, default=1, help="use every N-th file")
    parser.add_argument("--fps", type=int, default=3)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--runs", type=Path, help="parent folder of runs-<arm>-<seed>")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(path for path in options.folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    files = readable(files[:: options.every])
    print(f"{len(files)} clips, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
    columns = ["copies", "reading originals, clips/s", "reading copies, clips/s", "median speedup", "median PSNR, dB"]
    columns += ["10th percentile of PSNR, dB", "size / originals", "copies made per second"]
    print(f"| {' | '.join(columns)} |")
    print("|---|" + "---:|" * 7)
    print(measure(files, Compression(options.fps, options.size)), flush=True)
    if options.runs is not None:
        compare(options.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
