"""Evaluation of external scores: ranks, normalization, and warnings of similarity matrices."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.evaluator import SHORT, Evaluation, normalized_ranks
from tvr_lightning.evaluation.normalization import Context, Normalizer
from tvr_lightning.evaluation.scores_file import NOT_FOUND
from tvr_lightning.evaluation.sources import MatrixSource, ScoreSource
from tvr_lightning.metrics import RankMetric, direction_metrics
from tvr_lightning.ranks import Ranks, raise_on_nan

SCORE_WARNINGS = {
    "softmax": "rows or columns sum to one, so the scores of one direction depend on other test queries",
    "zeros": "many scores are exactly zero, as outside of re-ranked candidates",
    "ties": "many matches score the same as another item",
    "transposed?": "texts are probably in the columns",
    "chance": "rows or columns are probably in another order",
    "100.0": "every match is ranked first",
}
"""Warnings about scores by the words that they start with."""
MANY_ZEROS = 0.1
MANY_TIES = 0.05  # shares of the scores and of the queries
LEAST_VIDEOS = 100  # of test sets in which chance is far from useful


def evaluate_scores(
    scores: Tensor,
    truth: GroundTruth,
    normalizer: Normalizer | None = None,
    recall: Sequence[int] = (1, 5, 10),
    bank_texts: Tensor | None = None,
    bank_videos: Tensor | None = None,
    more: Sequence[RankMetric] = (),
) -> tuple[Evaluation, ScoreSource]:
    """Rank a similarity matrix (N, M), in the order of the split, in both directions.

    Returns the evaluation and the scores (N, M) of text-to-video, or keys in the order of the normalized scores. A
    direction without the bank that the normalizer needs is not normalized, which adds a warning: `bank_texts` (K, M)
    are scores of training texts against the split's videos, `bank_videos` (N, K) of its texts against training videos.
    Raises UserError if the normalizer needs scores that are not given, or cannot be applied to a matrix.
    """
    raise_on_nan(scores)
    warnings: list[str] = []
    left_out = int((scores == NOT_FOUND).sum())
    if left_out:
        warnings.append(f"{left_out} of {scores.numel()} pairs have no score and are ranked last")
    contexts: list[Context | None] = [None, None]
    banked = bank_texts is not None or bank_videos is not None
    if normalizer is not None:
        if left_out:
            raise UserError(f"{normalizer.name} needs the scores of all pairs, but {left_out} have none")
        if normalizer.needs_bank and not banked:
            raise UserError(
                f"{normalizer.name} needs scores of training queries. Pass --bank_texts, --bank_videos, or --bank half"
            )
        counts = torch.bincount(truth.video_of_text, minlength=truth.videos).double()
        ones = torch.ones(truth.texts, dtype=torch.float64)
        banks = bank_texts, None if bank_videos is None else bank_videos.T
        for place, (direction, bank, of) in enumerate(zip(SHORT, banks, ("texts", "videos"), strict=True)):
            if bank is None and (normalizer.needs_bank or banked):
                warnings.append(f"{direction} is not normalized: no scores of training {of} were given")
            else:
                sides = (counts, ones) if place else (ones, counts)
                contexts[place] = Context(direction, None if bank is None else MatrixSource(bank), *sides)
    ranks, keys = normalized_ranks(MatrixSource(scores), truth.video_of_text, normalizer, contexts, warnings)
    metrics = [*direction_metrics(recall), *more]
    warnings += _score_warnings(scores, truth, ranks)
    evaluation = Evaluation.of(
        metrics, ranks, truth, normalizer, warnings, texts=truth.texts, videos=truth.videos, partial=bool(left_out)
    )
    if banked and normalizer and normalizer.accepts_bank:
        evaluation.post_processing = f"{normalizer.name} with a bank"
        evaluation.transductive = False
    return evaluation, keys


def _score_warnings(scores: Tensor, truth: GroundTruth, ranks: tuple[Ranks, Ranks]) -> Iterator[str]:
    """Yield sentences about scores (N, M) that are not comparable with others or look wrong, and their ranks."""
    texts, videos = scores.shape
    positive = bool((scores >= 0).all())
    by_row, by_column = (positive and bool(((scores.sum(dim) - 1).abs() < 1e-3).all()) for dim in (1, 0))
    if by_row:
        yield "softmax: every row sums to one, so video-to-text depends on the other videos of the test set"
    if by_column:
        yield "softmax: every column sums to one, so text-to-video depends on the other texts of the test set"
    counts = [(scores != 0).sum(dim) for dim in (1, 0)]
    of_text, of_video = (float((count == count.median()).double().mean()) for count in counts)  # equal counts
    zeros = float((scores == 0).double().mean())
    if zeros > MANY_ZEROS:
        items, count = ("videos per text", counts[0]) if of_text >= of_video else ("texts per video", counts[1])
        yield (
            f"zeros: {100 * zeros:.0f} % of the scores are exactly zero, as if only {count.median()} {items} were "
            "scored; recalls beyond these candidates, MdR, and MnR are not comparable"
        )
    for ranked, items in zip(ranks, ("texts", "videos"), strict=True):
        tied = int((ranked.tied > 1).sum())
        if tied > MANY_TIES * len(ranked):
            yield f"ties: the matches of {tied:,} of {len(ranked):,} {items} score the same as another item"
    if (by_column and not by_row) or (zeros > MANY_ZEROS and of_video > 0.5 > of_text):
        yield (
            "transposed?: a softmax or a choice of candidates is usually over the videos of a text, but here over the "
            "texts of a video; texts belong in rows"
        )
    found = float(ranks[0].found_within(10).mean())
    by_chance = 10 / videos
    if videos >= LEAST_VIDEOS and found < by_chance + 3 * math.sqrt(by_chance / texts):  # three standard deviations
        yield f"chance: R@10 is {100 * found:.1f}, as of random scores; rows or columns are probably in another order"
    for ranked, direction in zip(ranks, ("text-to-video", "video-to-text"), strict=True):
        if bool((ranked.expected() == 1).all()):
            yield f"100.0: every match is ranked first in {direction}; check that the scores do not use the pairs"
