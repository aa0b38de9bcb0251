"""Simulations of the intervals and comparisons in results: how often they contain the truth, and how often they err.

Test sets are drawn from a known distribution. An interval of 95 % should contain the true value in about 95 % of them.
The page also has the percentile bootstrap, which this package does not use, for comparison.

Command: python benchmarks/interval_coverage.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from real_scores import table
from scipy.stats import binom

from tvr_lightning.evaluation.intervals import QueryValues, metric_interval
from tvr_lightning.evaluation.normalization import DualSoftmax, normalize_scores
from tvr_lightning.evaluation.statistics import Interval, holm, proportion_interval
from tvr_lightning.ranks import Ranks, text_to_video_ranks

ROOT = Path(__file__).parent.parent
RATES = (0.005, 0.02, 0.1, 0.48, 0.9, 0.98, 0.995)
# Videos, captions of each, and correlation of two captions of a video.
TEST_SETS = ((50, 1, 0.0), (100, 1, 0.0), (200, 1, 0.0), (1000, 1, 0.0), (10, 20, 0.0), (10, 20, 0.3), (10, 20, 0.6),
             (100, 20, 0.0), (100, 20, 0.3))  # fmt: skip
DRAWS = 500  # of the bootstrap
Random = np.random.Generator
Row = Sequence[str]


def hits(random: Random, rate: float, videos: int, captions: int, correlation: float) -> np.ndarray:
    """Return whether each query (videos, captions) is right; rates of videos have a beta distribution."""
    shape = 1 / correlation - 1 if correlation else np.inf
    rates = random.beta(rate * shape, (1 - rate) * shape, (videos, 1)) if correlation else rate
    return (random.random((videos, captions)) < rates).astype(float)


def bootstrap(random: Random, values: np.ndarray) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of values (videos, captions) over videos."""
    if values.shape[1] == 1:  # means of draws have a binomial distribution
        low, high = binom.ppf([0.025, 0.975], len(values), values.mean()) / len(values)
        return float(low), float(high)
    counts = random.multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS) / len(values)
    low, high = np.quantile(counts @ values.mean(1), [0.025, 0.975])
    return float(low), float(high)


def shares(random: Random, repeats: int) -> Iterator[Row]:
    """Yield for each test set how often the intervals of R@K contain the rate, without and with a bootstrap."""
    for videos, captions, correlation in TEST_SETS:
        group = torch.arange(videos).repeat_interleave(captions)
        covered = np.zeros((2, len(RATES)))
        for place, rate in enumerate(RATES):
            for _ in range(repeats):
                values = hits(random, rate, videos, captions, correlation)
                found = proportion_interval(torch.from_numpy(values).flatten(), group)
                ends = (found.low, found.high), bootstrap(random, values)
                covered[:, place] += [low <= rate <= high for low, high in ends]
        for name, row in zip(("here", "bootstrap"), 100 * covered / repeats, strict=True):
            yield [f"{videos} x {captions}", f"{correlation:g}", name, *(f"{each:.1f}" for each in row)]


def other_metrics(random: Random, repeats: int) -> Iterator[Row]:
    """Yield for each number of pairs and difficulty how often the intervals of other metrics contain their values."""
    metrics = ("RSum", "MRR", "nDCG@10", "MnR", "MdR")

    def queries(pairs: int, gallery: int, level: float) -> tuple[Ranks, torch.Tensor]:
        better = random.binomial(gallery - 1, 1 / (1 + np.exp(-random.normal(level, 2.5, pairs))))
        index = torch.arange(pairs)
        return Ranks(torch.from_numpy(better), torch.ones_like(index), index), index % gallery

    def interval_of(drawn: tuple[Ranks, torch.Tensor], metric: str) -> Interval:
        own = QueryValues.of(lambda _: drawn, "text_to_video", metric, ("R@1", "R@5", "R@10"))
        return metric_interval([own], metric)

    for pairs in (50, 200, 1000):
        for level in (-7.0, -4.0, -1.0):
            covered = dict.fromkeys(metrics, 0)
            large = queries(3000 * repeats, pairs, level)
            truth = {metric: interval_of(large, metric).estimate for metric in metrics}
            for _ in range(repeats):
                drawn = queries(pairs, pairs, level)
                for metric in metrics:
                    found = interval_of(drawn, metric)
                    covered[metric] += found.low - 1e-9 <= truth[metric] <= found.high + 1e-9
            recall = f"{100 * float(large[0].found_within(1).mean()):.1f}"
            yield [str(pairs), recall, *(f"{100 * covered[metric] / repeats:.1f}" for metric in metrics)]


def false_differences(random: Random, repeats: int) -> Iterator[Row]:
    """Yield for numbers of equal systems how many tables show a difference, without and with the correction."""
    for systems in (5, 10, 20):
        found = np.zeros(2)
        for _ in range(repeats):
            hard = random.normal(0, 1, 300)  # of queries, which all systems share
            right = hard + random.normal(0, 1, (systems, 300)) > 0
            wins, losses = np.array([[(b > a).sum(), (b < a).sum()] for a, b in combinations(right, 2)]).T
            # What the p-values of random exchanges approach with many draws.
            tests = np.minimum(2 * binom.cdf(np.minimum(wins, losses), wins + losses, 0.5), 1)
            found += [min(tests) < 0.05, min(holm(tests.tolist())) < 0.05]
        yield [str(systems), str(systems * (systems - 1) // 2), *(f"{100 * each / repeats:.1f}" for each in found)]


def normalization(random: Random, repeats: int) -> Iterator[Row]:
    """Yield how often the interval of R@1 contains its expectation if scores are normalized with the test texts."""
    videos = 200
    popular = random.normal(0, 1, videos)  # videos that many texts score high
    for spread in (0.0, 3.0):  # of texts that score all videos high or low
        recalls, ends = np.zeros((repeats, 2)), np.zeros((repeats, 2, 2))
        for repeat in range(repeats):
            match = torch.from_numpy(random.integers(0, videos, videos))
            noise = random.normal(0, 1, (videos, videos)) + popular + random.normal(0, spread, (videos, 1))
            scores = torch.from_numpy(noise)
            scores[torch.arange(videos), match] += 3
            for place, each in enumerate((scores, normalize_scores(DualSoftmax(1.0), scores, scores))):
                found = proportion_interval(text_to_video_ranks(each, match).found_within(1))
                recalls[repeat, place], ends[repeat, place] = found.estimate, (found.low, found.high)
        expected = recalls.mean(0)
        covered = 100 * ((ends[:, :, 0] <= expected) & (expected <= ends[:, :, 1])).mean(0)
        for name, recall, share in zip(("none", "dual softmax"), expected, covered, strict=True):
            yield [f"{spread:g}", name, f"{100 * recall:.1f}", f"{share:.1f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the test sets, to try the script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the page")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, random = time.process_time(), np.random.default_rng(0)
    many, some = (10, 2) if args.quick else (1000, 300)
    rates = [f"{100 * rate:g} %" for rate in RATES]
    parts = [
        table(("videos x captions", "correlation", "interval", *rates), shares(random, many)),
        table(("pairs", "R@1", "RSum", "MRR", "nDCG@10", "MnR", "MdR"), other_metrics(random, some)),
        table(("equal systems", "comparisons", "uncorrected", "Holm"), false_differences(random, many)),
        table(("spread of texts", "normalization", "R@1", "coverage"), normalization(random, many)),
    ]
    page = f"""# Coverage of intervals

`python benchmarks/interval_coverage.py`, {date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores
shared with other work, {time.process_time() - start:.0f} s of CPU time. All values are percentages of simulated test
sets; a 95 % interval should contain the true value in 95 % of them.

## Recalls

R@K is right or wrong for each query. "Correlation" is that of two captions of the same video. The interval is Wilson's
for the effective number of queries; few videos do not determine this number, so intervals on 10 videos are wide. For
comparison, the percentile bootstrap over videos, which is not used ({many} test sets for each value).

{parts[0]}

## Other metrics

Ranks among as many videos as pairs ({some} test sets for each value). MdR is a whole number, so its intervals contain
it more often.

{parts[1]}

## Equal systems

Tables in which at least one of the comparisons between equal systems appears as a difference (300 queries, {many}
tables for each row). "Resolved" in tables means p < 0.05 after Holm's correction.

{parts[2]}

## Normalization with the test texts

R@1 of 200 random texts and 200 videos, some of which score high for many texts ({many} test sets). If the other test
texts normalize the scores, queries are no longer independent. If some of these texts score all videos high, by the
given standard deviation, the interval is too narrow. Results with such a normalization are marked.

{parts[3]}
"""
    (args.out / "interval-coverage.md").write_text(page, encoding="utf-8")
    print(f"Wrote {args.out / 'interval-coverage.md'}")


if __name__ == "__main__":
    main()
