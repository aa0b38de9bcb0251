"""Two-stage retrieval as a post-processing: items that are not candidates of the first stage rank last."""

from __future__ import annotations

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.normalization import LEFT_OUT, Context, Direction, Normalizer
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.evaluation.sources import AdjustedSource, Adjustment, ScoreSource, TransposedSource
from tvr_lightning.evaluation.two_stage_ranks import text_ranks, video_ranks
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.pairwise.two_stage import QUERIES_PER_BLOCK, candidate_recall, nearest


class TwoStage(Normalizer):
    """Candidates by the cosine of sentence and mean frame, reranked by the method's score (GARE, appendix I).

    The method's score of a pair needs both its text and its video, so only the vectors of the first stage can be
    indexed. The results equal those of a search with such an index: the candidates of each query in the order of the
    method, then all other items in the order of the first stage. The recall of the candidates is also reported. The
    normalization works with any method; for other first-stage vectors, override `text_vectors` and `video_vectors`,
    which return (N, D) and (M, D).

    Args:
        candidates: number k of gallery items of each query that are reranked (paper: 256 include the top ten of GARE).
        mask_frames: exclusion of padded frames from the mean; GARE's released mean counts them.

    Raises:
        UserError: `candidates` is below 1.
    """

    transductive = False
    needs_bank = False

    def __init__(self, candidates: int = 256, mask_frames: bool = False) -> None:
        if candidates < 1:
            raise UserError(f"two-stage retrieval needs at least 1 candidate, not {candidates}")
        self.candidates = candidates
        self.mask_frames = mask_frames
        self.name = f"two stages ({candidates} candidates)"
        self._found: dict[Direction, Tensor] = {}

    def text_vectors(self, text: TextFeatures) -> Tensor:
        """Return the first-stage vectors of N texts, (N, D)."""
        return text.sentence

    def video_vectors(self, video: VideoFeatures) -> Tensor:
        """Return the first-stage vectors of M videos, (M, D): the mean of the frames."""
        if not self.mask_frames:
            return video.frames.mean(1)
        mask = video.frame_mask.to(video.frames.dtype).unsqueeze(-1)
        return (video.frames * mask).sum(1) / mask.sum(1).clamp(min=1.0)

    @torch.no_grad()
    def ranks(self, source: PairScores, video_of_text: Tensor) -> tuple[Ranks, Ranks]:
        """Compute the same ranks as `fit` and a pass over all pairs, but score only the candidates.

        Args:
            source: Scores of N texts against M videos by the method.
            video_of_text: Column of each text's video, (N,) int64.

        Returns:
            Ranks of the N texts by row, and of the videos that have texts by column.

        Raises:
            UserError: A score is NaN.
        """
        video_of_text = video_of_text.to(source.device)
        text = self.text_vectors(source.texts.float()).to(source.device)
        video = self.video_vectors(source.videos.float()).to(source.device)
        self._found = {
            "text-to-video": nearest(text, video, self.candidates, *_rows(source.budget, len(video))),
            "video-to-text": nearest(video, text, self.candidates, *_rows(source.budget, len(text))),
        }
        texts = text_ranks(source, video_of_text, self._found["text-to-video"], (text, video), source.budget)
        videos = video_ranks(source, video_of_text, self._found["video-to-text"], (text, video), source.budget)
        return texts, videos

    @torch.no_grad()
    def fit(self, scores: ScoreSource, context: Context) -> Adjustment:
        """Find the candidates of every query.

        Raises:
            UserError: `scores` come from a matrix, without the features that the first stage needs.
        """
        source, transposed = _pair_scores(scores)
        text = self.text_vectors(source.texts.float()).to(source.device)
        video = self.video_vectors(source.videos.float()).to(source.device)
        queries, gallery = (video, text) if transposed else (text, video)
        chosen = nearest(queries, gallery, self.candidates)
        self._found[context.direction] = chosen
        queries, gallery = unit(queries).double(), unit(gallery).double()

        def adjust(values: Tensor, rows: slice, columns: slice) -> Tensor:
            here = chosen[rows]
            row, slot = ((here >= columns.start) & (here < columns.stop)).nonzero(as_tuple=True)
            adjusted = queries[rows] @ gallery[columns].T + LEFT_OUT
            column = here[row, slot] - columns.start
            adjusted[row, column] = values[row, column].double()
            return adjusted

        return adjust

    def measured(self, video_of_text: Tensor) -> dict[str, float]:
        """Return the recall of the candidates in percent for each fitted direction, by name."""
        return {
            f"recall of the {self.candidates} candidates, {direction}": self._recall(direction, chosen, video_of_text)
            for direction, chosen in self._found.items()
        }

    def _recall(self, direction: Direction, chosen: Tensor, video_of_text: Tensor) -> float:
        texts = video_of_text.to(chosen.device)
        if direction == "text-to-video":
            return candidate_recall(chosen, texts)
        described = texts.unique()
        return candidate_recall(texts[chosen[described]], described)


def _rows(budget: int, gallery: int) -> tuple[int]:
    """Return the number of queries per block, limited by the memory for cosines and top candidates."""
    return (max(1, min(QUERIES_PER_BLOCK, budget // (16 * max(gallery, 1)))),)


def _pair_scores(scores: ScoreSource) -> tuple[PairScores, bool]:
    """Return the method's scores without adjustments, and True if videos are the queries."""
    transposed = False
    while isinstance(scores, (AdjustedSource, TransposedSource)):
        transposed ^= isinstance(scores, TransposedSource)
        scores = scores.source
    if not isinstance(scores, PairScores):
        raise UserError(
            "Two-stage retrieval needs the features of texts and videos for its first stage, but got a matrix."
        )
    return scores, transposed
