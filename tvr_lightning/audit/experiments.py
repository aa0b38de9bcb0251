"""Leakage audit: tests that the score of (text i, video j) depends only on text i and video j.

The audit treats the evaluated method as a black box and scores the same pairs again with other partners, in another
order, in blocks of other sizes, and with other captions of the same videos. A change beyond floating-point noise means
that the score uses other information. The size of the effect is R@1 with this information compared with R@1 without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.metrics import RecallAtK
from tvr_lightning.evaluation.ranks import text_to_video_ranks
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures

NOISE = 1e-4
"""Largest change that counts as floating-point noise, in standard deviations of the scores.

Blocks of other shapes change float32 scores by about 1e-6 standard deviations; leaks that affect a rank change them by
orders of magnitude more.
"""

LEAST_ITEMS = 4
"""Minimum number of texts and of videos, so that some of them can be removed."""

F = TypeVar("F", TextFeatures, VideoFeatures)
ScorePairs = Callable[[TextFeatures, VideoFeatures], Scores]
ScoreWithCaptions = Callable[[TextFeatures, VideoFeatures, TextFeatures], Scores]


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
    """Findings of an audit and the effect on the results table.

    Attributes:
        findings: One finding per experiment.
        recall_with_help: Text-to-video R@1 in percent if other information can reveal the match of a text.
        recall_without_help: The same without such information.
        texts, videos: Number of audited texts and videos.
        transductive: By direction, True if the score normalization uses other test queries; empty without one.
    """

    findings: list[Finding]
    recall_with_help: float
    recall_without_help: float
    texts: int
    videos: int
    transductive: dict[str, bool] = field(default_factory=dict)

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
            recall_with_help=self.recall_with_help,
            recall_without_help=self.recall_without_help,
            transductive=self.transductive,
        )


@dataclass
class _Bench:
    """One scoring function with the audited items.

    `score` returns the scores (n, m) of rows of texts and of videos. `own` is the row of the text that the protocol
    gives each video, if it gives any.
    """

    score: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    texts: int
    videos: int
    own: Tensor | None
    generator: torch.Generator

    def assembled(self, text_size: int, video_size: int) -> Tensor:
        """Return scores (N, M) assembled from blocks of random partners, with `own` passed along."""
        result: Tensor | None = None
        rows = torch.randperm(self.texts, generator=self.generator)
        columns = torch.randperm(self.videos, generator=self.generator)
        for some in rows.split(text_size):
            for few in columns.split(video_size):
                block = self.score(some, few, None if self.own is None else self.own[few])
                if result is None:
                    result = block.new_full((self.texts, self.videos), float("nan"))
                result[some.unsqueeze(1), few] = block
        assert result is not None
        return result


def audit_scores(
    texts: TextFeatures,
    videos: VideoFeatures,
    video_of_text: Tensor,
    *,
    score: ScorePairs | None = None,
    score_as_released: ScoreWithCaptions | None = None,
    seed: int = 0,
) -> Audit:
    """Audit a scoring function.

    Args:
        texts: Features of N texts after the method's own layers.
        videos: Features of M videos after the method's own layers.
        video_of_text: Index of the video that each text describes, (N,) int64. Every video has a text.
        score: The method's `score`, which returns (N, M) for N texts and M videos.
        score_as_released: Scoring function of a released protocol that gives every video its own caption, instead of
            `score`.
        seed: Seed for the random partners and orders.

    Raises:
        UserError: Not exactly one scoring function was passed, there are fewer than four texts or videos, or a video
            has no text.
    """
    if (score is None) == (score_as_released is None):
        raise UserError("give the audit either `score` or `score_as_released`")
    n, m = len(texts), len(videos)
    if min(n, m) < LEAST_ITEMS:
        raise UserError(f"an audit needs at least {LEAST_ITEMS} texts and {LEAST_ITEMS} videos, got {n} and {m}")
    first_text = torch.full((m,), n).scatter_reduce(0, video_of_text, torch.arange(n), "amin")
    if int(first_text.max()) == n:
        raise UserError("An audit needs a text for every video. Omit the videos without one.")

    in_place: set[str] = set()

    @torch.no_grad()
    def black_box(some: Tensor, few: Tensor, own: Tensor | None) -> Tensor:
        given: list[TextFeatures | VideoFeatures] = [texts[some], videos[few]]
        given += [] if own is None else [texts[own]]
        before = [[tensor._version for tensor in _tensors(record)] for record in given]
        function: Callable[..., Scores] | None = score_as_released or score
        assert function is not None
        similarity = function(*given).similarity
        for record, versions in zip(given, before, strict=True):
            if versions != [tensor._version for tensor in _tensors(record)]:
                in_place.add(type(record).__name__)
        return similarity

    own = first_text if score_as_released is not None else None
    bench = _Bench(black_box, n, m, own, torch.Generator().manual_seed(seed))
    paired = torch.arange(n)[torch.argsort(video_of_text, stable=True)]
    place = torch.argsort(paired)
    # As in released code that keeps texts in the order of their videos, so that the position reveals the match.
    evaluated = bench.score(paired, torch.arange(m), own)[place]
    scale = deviation(evaluated)
    findings = [
        compare_scores(name, evaluated, other, scale)
        for name, other in _experiments(bench, evaluated, paired, place).items()
    ]
    helpless = bench.assembled(max(2, n // 3), max(2, m // 3))
    if own is not None:
        helpless = _under_strangers_captions(bench, own)
        findings.append(compare_scores("captions of other videos", evaluated, helpless, scale))
    findings += [Finding(f"scoring changes {name} in place", None, True) for name in sorted(in_place)]
    return Audit(findings, recall_at_1(evaluated, video_of_text), recall_at_1(helpless, video_of_text), n, m)


def _experiments(bench: _Bench, evaluated: Tensor, paired: Tensor, place: Tensor) -> dict[str, Tensor]:
    n, m, own = bench.texts, bench.videos, bench.own
    order = torch.randperm(n, generator=bench.generator)
    columns = torch.randperm(m, generator=bench.generator)
    back = torch.argsort(columns)
    permuted = bench.score(order, columns, None if own is None else own[columns])
    doubled = bench.score(torch.cat([paired, paired.flip(0)]), torch.arange(m), own)
    few = torch.randperm(m, generator=bench.generator)[: max(2, m // 2)]
    # With many items, blocks are larger, since thousands of blocks would take too long.
    small, odd = (max(3, n // 8), max(2, m // 8)), (max(7, n // 5), max(5, m // 3))
    narrow = evaluated.clone()
    narrow[:, few] = bench.score(paired, few, None if own is None else own[few])[place]
    return {
        "other order of texts and videos": permuted[torch.argsort(order)][:, back],
        f"other partners, blocks of {small[0]} texts and {small[1]} videos": bench.assembled(*small),
        f"other partners, blocks of {odd[0]} texts and {odd[1]} videos": bench.assembled(*odd),
        "one video at a time": bench.assembled(n, 1),
        "other captions together with a text": doubled[:n][place],
        "half of the videos": narrow,
    }


def _under_strangers_captions(bench: _Bench, own: Tensor) -> Tensor:
    """Return scores (N, M) with the caption of another video given to each video."""
    shift = 1 + int(torch.randint(len(own) - 1, (1,), generator=bench.generator))
    return bench.score(torch.arange(bench.texts), torch.arange(bench.videos), own.roll(shift))


def compare_scores(
    experiment: str, expected: Tensor, found: Tensor, scale: float | None = None, noise: float = NOISE
) -> Finding:
    """Compare two scorings (N, M) of the same pairs, in units of `scale` (by default the deviation of `expected`)."""
    scale = deviation(expected) if scale is None else scale
    change = float((expected.double() - found.double()).abs().max()) / scale
    return Finding(experiment, change, not change <= noise)


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
    """Return text-to-video R@1 in percent for scores (N, M), given the video (N,) of each text."""
    return float(RecallAtK(1).value(text_to_video_ranks(similarity, video_of_text)))


def compare_features(experiment: str, expected: F, found: F, noise: float) -> Finding:
    """Compare the features (N, ...) of the same items, encoded twice.

    `noise` is the largest change that counts as noise, in standard deviations of each feature tensor.
    """
    change = max(
        float((a.double() - b.double()).abs().max() / a.double().std().clamp(min=1e-6 * float(a.abs().max()) + 1e-12))
        if a.shape == b.shape
        else float("inf")
        for a, b in zip(_tensors(expected), _tensors(found), strict=True)
    )
    return Finding(f"{experiment}, {type(expected).__name__}", change, not change <= noise)


def _tensors(features: TextFeatures | VideoFeatures) -> list[Tensor]:
    found: list[Tensor] = []
    features.apply(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return [tensor for tensor in found if tensor.is_floating_point() and tensor.numel() > 1]
