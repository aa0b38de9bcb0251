"""Evaluation of external scores: ranks, normalization, and intervals of similarity matrices."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.evaluator import Evaluation, normalized_ranks
from tvr_lightning.evaluation.normalization import Context, Normalizer
from tvr_lightning.evaluation.scores_file import NOT_FOUND
from tvr_lightning.evaluation.sources import MatrixSource, ScoreSource
from tvr_lightning.evaluation.statistics import Interval, percentile_interval, resample
from tvr_lightning.metrics import MeanRank, QueryMean, RetrievalRecall, direction_metrics
from tvr_lightning.ranks import Ranks, raise_on_nan


def evaluate_scores(
    scores: Tensor,
    truth: GroundTruth,
    normalizer: Normalizer | None = None,
    recall: Sequence[int] = (1, 5, 10),
    bank_texts: Tensor | None = None,
    bank_videos: Tensor | None = None,
    more: Sequence[QueryMean] = (),
) -> tuple[Evaluation, ScoreSource]:
    """Rank a similarity matrix in both directions.

    Returns the evaluation and the scores (N, M) of text-to-video, or keys in the order of the normalized scores.

    Args:
        scores: Similarity matrix (N, M) in the split's order.
        truth: Ground truth of the split.
        normalizer: Post-processing, applied to each direction separately. A direction without the bank that it needs
            is not normalized, which adds a warning.
        recall: Values of K for R@K.
        bank_texts: Scores (K, M) of training texts against the split's videos, for text-to-video.
        bank_videos: Scores (N, K) of the split's texts against training videos, for video-to-text.
        more: Further metrics.

    Raises:
        UserError: The normalizer needs scores that are not given, or cannot be applied to a matrix.
    """
    raise_on_nan(scores, "text", "video")
    warnings: list[str] = []
    left_out = int((scores == NOT_FOUND).sum())
    if left_out:
        warnings.append(f"{left_out} of {scores.numel()} pairs have no score and are ranked last")
    contexts: list[Context | None] = [None, None]
    if normalizer is not None:
        if left_out:
            raise UserError(f"{normalizer.name} needs the scores of all pairs, but {left_out} have none")
        if normalizer.needs_bank and bank_texts is None and bank_videos is None:
            raise UserError(f"{normalizer.name} needs scores of training queries. Pass --bank_texts or --bank_videos")
        counts = torch.bincount(truth.video_of_text, minlength=truth.videos).double()
        ones = torch.ones(truth.texts, dtype=torch.float64)
        if not normalizer.needs_bank or bank_texts is not None:
            bank = None if bank_texts is None else MatrixSource(bank_texts)
            contexts[0] = Context("text-to-video", bank, ones, counts)
        else:
            warnings.append("text-to-video is not normalized: no scores of training texts were given")
        if not normalizer.needs_bank or bank_videos is not None:
            bank = None if bank_videos is None else MatrixSource(bank_videos.T)
            contexts[1] = Context("video-to-text", bank, counts, ones)
        else:
            warnings.append("video-to-text is not normalized: no scores of training videos were given")
    ranks, keys = normalized_ranks(MatrixSource(scores), truth.video_of_text, normalizer, contexts, warnings)
    metrics = [*direction_metrics(recall), *more]
    evaluation = Evaluation.of(
        metrics, ranks, truth, normalizer, warnings, texts=truth.texts, videos=truth.videos, partial=bool(left_out)
    )
    return evaluation, keys


def intervals(
    evaluation: Evaluation, truth: GroundTruth, recall: Sequence[int], more: Sequence[QueryMean] = ()
) -> dict[str, dict[str, Interval]]:
    """Return 95 % bootstrap intervals over queries by direction and name, for every metric with a value per query."""
    found: dict[str, dict[str, Interval]] = {}
    for direction, (ranks, group) in _directions(evaluation, truth).items():
        row = found[direction] = {}
        for metric in _per_query(recall, more):
            values = metric.values(ranks)
            row[metric.name] = percentile_interval(float(values.mean()), resample(values, group))
        expected = ranks.expected()
        row["MdR"] = percentile_interval(float(expected.quantile(0.5)), resample(expected, group, "median"))
    return found


def _directions(evaluation: Evaluation, truth: GroundTruth) -> dict[str, tuple[Ranks, Tensor]]:
    """Return the ranks and the video of each query in both directions; queries of one video are resampled together."""
    texts, videos = evaluation.text_to_video_ranks, evaluation.video_to_text_ranks
    return {"text-to-video": (texts, truth.video_of_text[texts.index]), "video-to-text": (videos, videos.index)}


def _per_query(recall: Sequence[int], more: Sequence[QueryMean]) -> list[QueryMean]:
    return [*map(RetrievalRecall, recall), MeanRank(), *more]
