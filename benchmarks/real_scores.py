"""Score matrices of real systems: how much a test set can resolve, and what normalization adds to them.

FOLDER contains SYSTEM_DATASET.npz with a square matrix each (texts in rows, videos in columns, row i matches column i),
such as those of github.com/mohammad2012191/ViC. The script writes real-scores.md and an image of the intervals.

Command: python benchmarks/real_scores.py FOLDER
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tvr_lightning.evaluation.normalization import (
    DualSoftmax,
    Normalizer,
    QueryBankNorm,
    SinkhornBias,
    normalize_scores,
)
from tvr_lightning.evaluation.statistics import (
    Interval,
    detectable_difference,
    holm,
    paired_comparison,
    proportion_interval,
)
from tvr_lightning.ranks import text_to_video_ranks, video_to_text_ranks
from tvr_lightning.reproduce.report.drawing import COLORS, drawings, in_style, new_panels

ROOT = Path(__file__).parent.parent
RANKS = {"text to video": text_to_video_ranks, "video to text": video_to_text_ranks}
TITLES, NAMES = {"msrvtt": "MSR-VTT 1k-A", "didemo": "DiDeMo"}, {"clip4clip": "CLIP4Clip"}
RECALLS = (1, 5, 10)
HALVES = 20
# Temperatures as multiples of the inverse standard deviation of the scores, which differ in scale between systems.
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
NORMALIZERS: dict[str, Callable[[float], Normalizer]] = {
    "Sinkhorn (NCL)": lambda scale: SinkhornBias(1 / scale),
    "dual softmax": DualSoftmax,
    "QB-Norm": QueryBankNorm,
}
Row = Sequence[str]


def read(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the matrices (N, N) float64 by dataset and system."""
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for file in sorted(folder.glob("*_*.npz"), key=lambda file: file.name.lower()):
        system, _, dataset = file.stem.rpartition("_")
        with np.load(file) as arrays:
            found[dataset][NAMES.get(system, system)] = torch.from_numpy(arrays[arrays.files[0]]).double()
    if not found:
        raise SystemExit(f"{folder} contains no SYSTEM_DATASET.npz")
    return dict(sorted(found.items(), reverse=True))


def text_first(scores: Tensor) -> Tensor:
    """Return the probability (N,) that the first video of each text is right, in percent."""
    return 100 * text_to_video_ranks(scores, torch.arange(len(scores))).found_within(1)


def table(head: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def percentage(values: Tensor) -> Interval:
    """Return the mean of values (N,) from 0 to 1 with its interval, in percent."""
    found = proportion_interval(values)
    return Interval(float((100 * values).mean()), 100 * found.low, 100 * found.high)


def shown(interval: Interval, sign: str = "") -> str:
    """Return a value with its interval, such as `34.4 [31.5, 37.4]`."""
    return f"{interval.estimate:{sign}.1f} [{interval.low:{sign}.1f}, {interval.high:{sign}.1f}]"


def recalls(systems: dict[str, Tensor]) -> list[Row]:
    """Return rows with both directions of each system, with intervals over queries."""
    rows = []
    for system, scores in systems.items():
        for direction, ranked in RANKS.items():
            ranks = ranked(scores, torch.arange(len(scores)))
            cells = []
            for k in RECALLS:
                cells.append(shown(percentage(ranks.found_within(k))))
            rows.append([system, direction, *cells])
    return rows


def differences(systems: dict[str, Tensor]) -> tuple[list[Row], list[tuple[int, float]]]:
    """Return rows of paired differences of text-to-video R@1, and (differing queries, half-width) of each pair."""
    first = {name: text_first(scores) for name, scores in systems.items()}
    pairs = list(combinations(first, 2))
    compared = [paired_comparison(first[b] - first[a]) for a, b in pairs]
    corrected = holm([found.p_value for found in compared])
    rows, spread = [], []
    for (a, b), found, p in zip(pairs, compared, corrected, strict=True):
        differing = int(((first[b] - first[a]).abs() > 50).sum())
        half = (found.difference.high - found.difference.low) / 2
        ends = [detectable_difference(first[b] - first[a], power=power) for power in (0.5, 0.8)]
        rows.append([f"{b} minus {a}", shown(found.difference, "+"), f"{p:.2g}", str(differing), f"{half:.1f}",
                     *(f"{end:.1f}" for end in ends)])  # fmt: skip
        spread.append((differing, half))
    return rows, spread


def ranked_first(scores: Tensor, texts: Tensor, bank: Tensor, normalizer: Normalizer | None = None) -> Tensor:
    """Return whether the first result is right (Q,), in percent, of `texts` (Q,) among their own videos."""
    found = scores[texts][:, texts]
    if normalizer is not None:
        found = normalize_scores(normalizer, found, scores[bank][:, texts])
    return text_first(found)


def best_scale(scores: Tensor, bank: Tensor, made: Callable[[float], Normalizer]) -> float:
    """Return the scale that is best within the bank: its first half ranked with the second one as bank."""
    first, second = bank.tensor_split(2)
    scales = [scale / float(scores.std()) for scale in SCALES]
    return max(scales, key=lambda scale: float(ranked_first(scores, first, second, made(scale)).mean()))


def gains(scores: Tensor, made: Callable[[float], Normalizer]) -> list[Interval]:
    """Return the gain in R@1 of a normalization with the ranked texts as the bank, and with other texts.

    Each half of 20 random divisions is ranked, and the scale is chosen within the other half.
    """
    sums = torch.zeros(2, len(scores), dtype=torch.float64)
    for seed in range(HALVES):
        halves = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed)).tensor_split(2)
        for texts, others in (halves, halves[::-1]):
            normalizer, plain = made(best_scale(scores, others, made)), ranked_first(scores, texts, others)
            for place, bank in enumerate((texts, others)):
                sums[place, texts] += ranked_first(scores, texts, bank, normalizer) - plain
    return [paired_comparison(each).difference for each in sums / HALVES]


@in_style()
def image(matrices: dict[str, dict[str, Tensor]]) -> bytes:
    """Return the text-to-video R@1 of all systems with their intervals as an SVG file."""
    (axis,) = new_panels(1, height=2.6, layout="constrained")
    names, at = [], 0
    for color, (dataset, systems) in zip(COLORS, matrices.items(), strict=False):
        label = TITLES.get(dataset, dataset)
        for system, scores in systems.items():
            found = percentage(text_first(scores) / 100)
            error = [[found.estimate - found.low], [found.high - found.estimate]]
            axis.errorbar([found.estimate], [-at], xerr=error, fmt="o", color=color, capsize=3, label=label)
            names.append(system)
            label, at = "", at + 1
    axis.set_yticks([-place for place in range(at)], names)
    axis.set_xlabel("text-to-video R@1, 95 % intervals")
    axis.figure.legend(loc="outside lower center", ncols=2)
    return drawings([axis], "Intervals of real systems")[0].content


def main() -> None:
    """Measure, and write the page and the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of SYSTEM_DATASET.npz")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, matrices = time.process_time(), read(args.folder)
    parts, spread, normalized = [], [], []
    for dataset, systems in matrices.items():
        title = TITLES.get(dataset, dataset)
        print(f"{title}: {', '.join(systems)}", flush=True)
        rows, found = differences(systems)
        spread += found
        titles = ("difference", "p (Holm)", "queries with one right", "half-width", "seen in 50 %", "seen in 80 %")
        of_systems = table(("system", "direction", *(f"R@{k}" for k in RECALLS)), recalls(systems))
        parts.append(f"## {title}\n\n{of_systems}\n\n{table(('text-to-video R@1', *titles), rows)}")
        for system, scores in systems.items():
            print(f"{title}: normalization of {system}", flush=True)
            # A softmax over the videos of each text is undone up to a constant per text.
            softmax = bool(((scores.sum(1) - 1).abs() < 1e-3).all() and (scores > 0).all())
            usable = scores.log() if softmax else scores
            for name, made in NORMALIZERS.items():
                normalized.append([title, system, name, *(shown(each, "+") for each in gains(usable, made))])
    least, most = min(spread), max(spread)
    half = [round(value, 1) for _, value in (least, most)]
    page = f"""# Score matrices of real systems

`python benchmarks/real_scores.py FOLDER`, {date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores
shared with other work, torch {torch.__version__}, {time.process_time() - start:.0f} s of CPU time. The matrices are
those of github.com/mohammad2012191/ViC (CVPR 2026 Findings), commit 4f73afa, and are not part of this repository. How
these systems were trained is not known here. CLIP4Clip's scores are logits. VAST's are those of a re-ranked list of
candidates with many exact zeros, so its recalls beyond the candidates depend on ties. The rows of InternVideo2's sum to
one.

**What a test set resolves.** The 95 % interval of the paired difference of two systems has a half-width of
{half[0]:.1f} to {half[1]:.1f} points of R@1. It depends on the number of queries on which exactly one system is right:
{least[0]} for the most similar pair and {most[0]} for the least similar one. Papers publish no results of single
queries. If the values of two papers differ by less, this test set does not show which system is better.

Brackets are 95 % intervals over queries: the gallery is fixed, and training was not repeated. "Seen in 80 %" is the
true difference that four of five such test sets show at the 5 % level; half of them show the difference "seen in 50 %".

![R@1 of each system with its interval](../../docs/images/real-scores.svg)

{(chr(10) * 2).join(parts)}

## Normalization

Difference in text-to-video R@1 to the scores as they are. In {HALVES} random divisions, each half of the texts is
ranked against its own videos. The bank is either these texts, one for every video, as in many papers, or the texts of
the other half, whose videos are not searched, as in a search that knows earlier queries. The temperature is chosen
within the other half. For InternVideo2, the logarithm of the scores is normalized, which undoes the softmax up to a
constant per text.

{table(("dataset", "system", "normalization", "the ranked texts as bank", "other texts as bank"), normalized)}
"""
    (args.out / "real-scores.md").write_text(page, encoding="utf-8")
    (ROOT / "docs" / "images" / "real-scores.svg").write_bytes(image(matrices))
    print(f"Wrote {args.out / 'real-scores.md'}")


if __name__ == "__main__":
    main()
