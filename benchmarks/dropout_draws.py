"""Effect of drawing dropout per video instead of per pair, with small heads in the experiments of mechanisms.py.

    python benchmarks/dropout_draws.py    # writes results/dropout-draws.md

Heads and synthetic features are those of two claims of mechanisms.py, with the papers' dropout of 0.3. For each seed,
three heads start from the same weights and train on the same batches: with dropout per pair (as released), with dropout
per video, and without dropout, to show whether dropout has an effect at all. These settings were committed before the
five seeds were run.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean

import torch
from mechanisms_claims import gare, tcmgc
from mechanisms_heads import TEXT_TO_VIDEO, VIDEO_TO_TEXT, Head, outcome
from mechanisms_page import estimate
from mechanisms_worlds import make_world

from tvr_lightning.methods.gare.options import GapIncrement
from tvr_lightning.methods.tcmgc.options import LanguageVideoAttention, TCMGCOptions
from tvr_lightning.methods.xpool import XPoolOptions

DROPOUT, RATE = 0.3, 1e-3
DRAWS = ("pair", "video", "none")


def _tcmgc(attention: LanguageVideoAttention) -> TCMGCOptions:
    return replace(tcmgc(on="cosines"), attention=attention)


HEADS: dict[str, tuple[str, float, dict[str, Head]]] = {
    "X-Pool": (
        "undescribed scenes",
        0.5,
        {
            "pair": XPoolOptions(dropout=DROPOUT),
            "video": XPoolOptions(dropout=DROPOUT, dropout_per="video"),
            "none": XPoolOptions(dropout=0.0),
        },
    ),
    "TC-MGC": (
        "undescribed scenes",
        0.5,
        {
            "pair": _tcmgc(LanguageVideoAttention(dropout=DROPOUT)),
            "video": _tcmgc(LanguageVideoAttention(dropout=DROPOUT, dropout_per="video")),
            "none": _tcmgc(LanguageVideoAttention(dropout=0.0)),
        },
    ),
    "GARE": (
        "gap",
        1,
        {
            "pair": gare(increment=GapIncrement(dropout=DROPOUT)),
            "video": gare(increment=GapIncrement(dropout=DROPOUT, dropout_per="video")),
            "none": gare(increment=GapIncrement(dropout=0.0)),
        },
    ),
}
"""Experiment, strength, and heads by kind of dropout, for each method."""


def main() -> None:
    """Train all heads and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "dropout-draws.md")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds is {args.seeds}; an interval needs at least 2")
    torch.set_num_threads(1)
    rows, start = [], time.process_time()
    for name, (world, strength, heads) in HEADS.items():
        found: dict[tuple[str, str], list[float]] = {}
        for seed in range(args.seeds):
            made = make_world(world, seed, strength)
            for draws in DRAWS:
                figures = outcome(heads[draws], made, seed, RATE, 1.0, args.steps)["test"]["plain"]
                for direction in (TEXT_TO_VIDEO, VIDEO_TO_TEXT):
                    found.setdefault((draws, direction), []).append(figures[direction])
                print(f"{name}, seed {seed}, {draws}: {figures[TEXT_TO_VIDEO]:.2f}", flush=True)
        for direction in (TEXT_TO_VIDEO, VIDEO_TO_TEXT):
            per = {draws: found[draws, direction] for draws in DRAWS}
            cells = [name, world, direction.replace("_", " "), *(f"{fmean(per[draws]):.1f}" for draws in DRAWS)]
            cells += [_difference(per["video"], per["pair"]), _difference(per["none"], per["pair"])]
            rows.append(f"| {' | '.join(cells)} |")
    spent = (time.process_time() - start) / 60
    args.out.write_text(_page(rows, args, spent), encoding="utf-8")


def _difference(some: list[float], others: list[float]) -> str:
    found = estimate([one - other for one, other in zip(some, others, strict=True)])
    mean, half = found["mean"], found["half_width"]
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


def _page(rows: list[str], args: argparse.Namespace, minutes: float) -> str:
    table = "\n".join(rows)
    return f"""# Dropout per pair and per video

`python benchmarks/dropout_draws.py`, {date.today()}, {platform.machine()}, torch {torch.__version__}, one thread,
{minutes:.1f} minutes of CPU time. Experiments and heads are those of `benchmarks/mechanisms.py` at strengths of 0.5
(undescribed scenes) and 1 (gap), with the papers' dropout of {DROPOUT}, {args.seeds} seeds, and {args.steps} steps with
batches of 64. The settings were committed before the run. R@1 is in percent, the mean over seeds. Differences are
paired by seed, with 95 % t intervals in brackets.

| method | experiment | direction | per pair | per video | no dropout | per video - per pair | none - per pair |
|---|---|---|---:|---:|---:|---:|---:|
{table}
"""


if __name__ == "__main__":
    main()
