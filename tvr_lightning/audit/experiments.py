"""Leakage audit: tests that the score of (text i, video j) depends only on text i and video j.

The audit treats the evaluated method as a black box and scores the same pairs again with other partners, in another
order, in blocks of other sizes, and with other captions of the same videos. A change beyond floating-point noise means
that the score uses other information. The size of the effect is R@1 with this information compared with R@1 without.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.normalization import Context, Normalizer
from tvr_lightning.evaluation.pair_scores import LeakingScore, PairScores, Score
from tvr_lightning.evaluation.sources import AdjustedSource, ScoreSource, TransposedSource, complete_matrix
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.metrics import Direction
from tvr_lightning.ranks import text_to_video_ranks

# Largest change that counts as floating-point noise, in standard deviations of the scores. Blocks of other shapes
# change float32 scores by about 1e-6 of them; leaks that affect a rank change scores by orders of magnitude more.
NOISE = 1e-4
ROUNDING = 8 * torch.finfo(torch.float32).eps  # the same relative to the largest score, if all are nearly equal
MOVED = 1e-3  # the same for normalized scores, in median absolute deviations

Features = tuple[TextFeatures, VideoFeatures]


@dataclass(frozen=True)
class Finding:
    """Result of one experiment.

    Attributes:
        experiment: Difference between two scorings of the same pairs, or another action of the method.
        change: Largest change of a score, in standard deviations within rows and columns; None if nothing was compared.
        leaks: True if the change exceeds the noise.
    """

    experiment: str
    change: float | None
    leaks: bool


@dataclass(frozen=True)
class Audit:
    """Findings of an audit and the effect on the results table; the other attributes are those of `AuditResult`."""

    findings: list[Finding]
    recall_with_help: float
    recall_without_help: float
    texts: int
    videos: int
    transductive: dict[str, bool] = field(default_factory=dict)
    problem: str | None = None

    @property
    def leaks(self) -> bool:
        """True if any experiment changed a score."""
        return any(finding.leaks for finding in self.findings)

    @property
    def result(self) -> AuditResult:
        """Summary for a results table."""
        return AuditResult(
            passed=not self.leaks,
            leaks=[finding.experiment for finding in self.findings if finding.leaks],
            texts=self.texts,
            videos=self.videos,
            experiments=len(self.findings),
            recall_with_help=None if self.problem else self.recall_with_help,
            recall_without_help=None if self.problem else self.recall_without_help,
            transductive=self.transductive,
            problem=self.problem,
        )


def audit_scores(
    texts: TextFeatures,
    videos: VideoFeatures,
    video_of_text: Tensor,
    *,
    score: Score | None = None,
    score_as_released: LeakingScore | None = None,
    seed: int = 0,
) -> Audit:
    """Audit a method's `score` of N texts and M videos, (N, M), or its `score_as_released`, with the videos' captions.

    Features are those after the method's own layers. `video_of_text` (N,) int64 is the index of the video that each
    text describes; every video has a text. `seed` determines the random partners and orders.
    """
    n, m = len(texts), len(videos)
    own = torch.full((m,), n).scatter_reduce(0, video_of_text, torch.arange(n), "amin")
    generator = torch.Generator().manual_seed(seed)
    all_videos = torch.arange(m)
    in_place: set[str] = set()

    @torch.no_grad()
    def scores(rows: Tensor, columns: Tensor, captions: Tensor = own) -> Tensor:
        """Return the scores of some texts and videos; `captions` are the texts that a protocol gives the M videos."""
        given: list[Any] = [texts[rows], videos[columns]]
        if score_as_released is not None:
            given.append(texts[captions[columns]])
        before = [[tensor._version for tensor in record.tensors()] for record in given]
        function: Any = score_as_released or score
        similarity: Tensor = function(*given).similarity
        for record, versions in zip(given, before, strict=True):
            if versions != [tensor._version for tensor in record.tensors()]:
                in_place.add(type(record).__name__)
        return similarity

    def assembled(text_size: int, video_size: int) -> Tensor:
        """Return the scores (N, M) assembled from blocks of random partners."""
        result = torch.full((n, m), float("nan"), dtype=torch.float64)
        rows, columns = torch.randperm(n, generator=generator), torch.randperm(m, generator=generator)
        for some in rows.split(text_size):
            for few in columns.split(video_size):
                result[some[:, None], few] = scores(some, few).double()
        return result

    # As in released code that keeps texts in the order of their videos, so that the position reveals the match.
    paired = torch.argsort(video_of_text, stable=True)
    place = torch.argsort(paired)
    evaluated = scores(paired, all_videos)[place]
    order, columns = torch.randperm(n, generator=generator), torch.randperm(m, generator=generator)
    permuted = scores(order, columns)[torch.argsort(order)][:, torch.argsort(columns)]
    doubled = scores(torch.cat([paired, paired.flip(0)]), all_videos)[:n][place]
    few = torch.randperm(m, generator=generator)[: max(2, m // 2)]
    narrow = evaluated.clone()
    narrow[:, few] = scores(paired, few)[place]
    # With many items, blocks are larger, since thousands of blocks would take too long.
    small = (max(3, n // 8), max(2, m // 8))
    odd = (max(7, n // 5), max(5, m // 3))
    others = {
        "other order of texts and videos": permuted,
        f"other partners, blocks of {small[0]} texts and {small[1]} videos": assembled(*small),
        f"other partners, blocks of {odd[0]} texts and {odd[1]} videos": assembled(*odd),
        "one video at a time": assembled(n, 1),
        "other captions together with a text": doubled,
        "half of the videos": narrow,
    }
    if score_as_released is None:
        helpless = assembled(max(2, n // 3), max(2, m // 3))
    else:
        shift = 1 + int(torch.randint(m - 1, (1,), generator=generator))
        helpless = others["captions of other videos"] = scores(torch.arange(n), all_videos, own.roll(shift))
    findings = [compare_scores(name, evaluated, other) for name, other in others.items()]
    findings += [Finding(f"scoring changes {name} in place", None, True) for name in sorted(in_place)]
    return Audit(findings, recall_at_1(evaluated, video_of_text), recall_at_1(helpless, video_of_text), n, m)


def compare_scores(experiment: str, expected: Tensor, found: Tensor, noise: float = NOISE) -> Finding:
    """Compare two scorings (N, M) of the same pairs, in units of the deviation of `expected`."""
    change = float((expected.double() - found.double()).abs().max())
    rounded = change <= ROUNDING * float(expected.abs().max()) < math.inf
    relative = change / deviation(expected)
    return Finding(experiment, relative, not (relative <= noise or rounded))


def deviation(scores: Tensor) -> float:
    """Return the standard deviation of scores (N, M) within rows and columns, greater than zero.

    Offsets of whole texts or videos do not count, so that they cannot hide a leak; a thousandth of the largest score
    is the least, since larger scores are rounded more.
    """
    scores = scores.double()
    within = scores - scores.mean(0) - scores.mean(1, keepdim=True) + scores.mean()
    least = max(1e-3 * float(scores.abs().max()), torch.finfo(torch.float32).tiny)
    return max(float(within.std()), least)


def recall_at_1(similarity: Tensor, video_of_text: Tensor) -> float:
    """Return text-to-video R@1 in percent for scores (N, M), given the video (N,) of each text; NaN ranks last."""
    comparable = similarity.nan_to_num(-math.inf, math.inf, -math.inf)
    return 100.0 * float(text_to_video_ranks(comparable, video_of_text).found_within(1).mean())


def compare_features(experiment: str, expected: Features, found: Features, noise: float) -> list[Finding]:
    """Compare the features (N, ...) and (M, ...) of the same texts and videos, encoded twice.

    `noise` is the largest change that counts as noise, in standard deviations of each feature tensor.
    """
    findings = []
    for before, after in zip(expected, found, strict=True):
        changes = []
        for one, other in zip(before.tensors(), after.tensors(), strict=True):
            if one.shape != other.shape:
                changes.append(math.inf)
            elif one.numel() > 1:
                one, other = one.double(), other.double()
                scale = one.std().clamp(min=1e-6 * float(one.abs().max()) + 1e-12)
                changes.append(float((one - other).abs().max() / scale))
        change = _largest(changes)
        findings.append(Finding(f"{experiment}, {type(before).__name__}", change, not change <= noise))
    return findings


def _largest(changes: list[float]) -> float:
    """Return the largest change, or NaN if one is, which no bound allows."""
    return float(torch.tensor(changes).max())


def normalizer_movement(
    normalizer: Normalizer,
    score: Callable[..., Scores],
    features: Features,
    video_of_text: Tensor,
    own_text: Tensor | None,
    temperature: float,
    generator: torch.Generator,
) -> dict[Direction, float]:
    """Return the largest change of a normalized score per direction when a random half of the queries is removed.

    If the normalizer needs a bank, all N texts and M videos are the bank, regardless of the queries. `video_of_text`
    (N,) is the video of each text, `own_text` (M,) the text that a released protocol gives each video.
    """
    texts, videos = features
    n, m = len(texts), len(videos)
    captions = torch.bincount(video_of_text, minlength=m)

    def source(rows: Tensor, columns: Tensor) -> ScoreSource:
        own = [] if own_text is None else [texts[own_text[columns]]]
        return PairScores(score, texts[rows], videos[columns], memory_budget_bytes=2**30, own_texts=own)

    def normalized(direction: Direction, queries: Tensor) -> Tensor:
        """Return the normalized scores (Q, G) of Q queries for the whole gallery, float64 on the CPU."""
        bank = source(torch.arange(n), torch.arange(m))
        if direction == "text-to-video":
            scores = source(queries, torch.arange(m))
            counts = torch.ones(len(queries)), torch.bincount(video_of_text[queries], minlength=m)
        else:
            scores, bank = TransposedSource(source(torch.arange(n), queries)), TransposedSource(bank)
            counts = captions[queries], torch.ones(n)
        query_counts, gallery_counts = (count.double().to(scores.device) for count in counts)
        fitted = copy.deepcopy(normalizer)
        given = bank if fitted.needs_bank else None
        parts = [bank] if fitted.needs_parts else []  # any part is enough for what the audit measures
        adjust = fitted.fit(scores, Context(direction, given, query_counts, gallery_counts, temperature, parts))
        return complete_matrix(AdjustedSource(scores, adjust)).cpu()

    def movement(direction: Direction, queries: int) -> float:
        whole = normalized(direction, torch.arange(queries))
        spread = float((whole - whole.median()).abs().median()) or float(whole.std()) or 1.0
        halves = [half.sort().values for half in torch.randperm(queries, generator=generator).tensor_split(2)]
        return _largest([float((normalized(direction, half) - whole[half]).abs().max()) / spread for half in halves])

    return {"text-to-video": movement("text-to-video", n), "video-to-text": movement("video-to-text", m)}
