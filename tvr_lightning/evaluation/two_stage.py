"""Two-stage retrieval: candidates by indexable cosines, reranked by the score of pairs; all other items rank last."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.normalization import Context, Normalizer
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.reranker import RerankedPairs, Reranker, rerank
from tvr_lightning.evaluation.sources import Adjustment, Block, ScoreSource, TransposedSource
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.metrics import Direction
from tvr_lightning.option_types import Count, Role, check

# Offset of the scores of pairs that are not candidates.
LEFT_OUT = -1e6
QUERIES_PER_BLOCK = 1024
VIDEOS_PER_BLOCK = 16


class TwoStage(Normalizer):
    """Candidates by the cosine of sentence and mean frame, reranked by the method's score (GARE, appendix I).

    The method's score of a pair needs both its text and its video, so only the vectors of the first stage can be
    indexed. The results equal those of a search with such an index: the candidates of each query in the order of the
    second stage, then all other items in the order of the first. The recall of the candidates is also reported. For
    other first-stage vectors, override `text_vectors` and `video_vectors`.

    Args:
        candidates: number k of gallery items of each query that are reranked (paper: 256 include the top ten of GARE).
        mask_frames: exclusion of padded frames from the mean; GARE's released mean counts them.
        reranker: second stage that scores captions with video files instead of the method's score.
        scores_folder: folder for the reranker's scores, which are written after each video and not computed again.
    """

    def __init__(
        self,
        candidates: Count = 256,
        mask_frames: bool = False,
        reranker: Reranker | None = None,
        scores_folder: Annotated[str, Role.MACHINE] = "runs/reranked",
    ) -> None:
        self.candidates = candidates
        self.mask_frames = mask_frames
        self.reranker = reranker
        self.scores_folder = scores_folder
        by = "" if reranker is None else f" reranked by {reranker.name}"
        self.name = f"two stages ({candidates} candidates{by})"
        self._found: dict[Direction, Tensor] = {}
        self._reranked: RerankedPairs | None = None
        check(self)

    def text_vectors(self, text: TextFeatures) -> Tensor:
        """Return the first-stage vectors of N texts, (N, D)."""
        return text.sentence

    def video_vectors(self, video: VideoFeatures) -> Tensor:
        """Return the first-stage vectors of M videos, (M, D): the mean of the frames."""
        return masked_mean(video.frames, video.frame_mask) if self.mask_frames else video.frames.mean(1)

    @override
    @torch.no_grad()
    def fit(self, scores: ScoreSource, context: Context) -> Adjustment:
        if isinstance(scores, TransposedSource):
            scores = scores.source
        source = scores.pairs if isinstance(scores, UnscoredPairs) else scores
        if not isinstance(source, PairScores):
            raise UserError(
                "Two-stage retrieval needs the features of texts and videos for its first stage, but got a matrix."
            )
        direction = context.direction
        chosen = self._found[direction] = self._candidates(source, direction)
        scored = None
        if self.reranker is not None:
            if self._reranked is None:
                directions: list[Direction] = ["text-to-video", "video-to-text"] if context.both else [direction]
                asked = [_keys(self._candidates(source, each), source, each).flatten() for each in directions]
                self._reranked = rerank(self.reranker, source, torch.cat(asked).unique(), Path(self.scores_folder))
            scored = self._reranked.of(_keys(chosen, source, direction)).to(source.device)
        elif source is not scores:
            scored = _candidate_scores(source, chosen, direction)
        queries, gallery = (unit(vectors).double() for vectors in self._vectors(source, direction))

        def adjust(values: Tensor, rows: slice, columns: slice) -> Tensor:
            here = chosen[rows]
            row, slot = ((here >= columns.start) & (here < columns.stop)).nonzero(as_tuple=True)
            column = here[row, slot] - columns.start
            adjusted = queries[rows] @ gallery[columns].T + LEFT_OUT
            adjusted[row, column] = (values[row, column] if scored is None else scored[rows][row, slot]).double()
            return adjusted

        return adjust

    def _vectors(self, source: PairScores, direction: Direction) -> tuple[Tensor, Tensor]:
        """Return the first-stage vectors of the queries (Q, D) and of the gallery (G, D)."""
        texts = self.text_vectors(source.texts.float()).to(source.device)
        videos = self.video_vectors(source.videos.float()).to(source.device)
        return (texts, videos) if direction == "text-to-video" else (videos, texts)

    def _candidates(self, source: PairScores, direction: Direction) -> Tensor:
        """Return the gallery items (Q, k) of each query, best first."""
        queries, gallery = self._vectors(source, direction)
        block = max(1, min(QUERIES_PER_BLOCK, source.budget // (16 * max(len(gallery), 1))))
        return nearest(queries, gallery, self.candidates, block)

    @override
    def measured(self, video_of_text: Tensor) -> dict[str, float]:
        recalls = {}
        for direction, chosen in self._found.items():
            own = video_of_text.to(chosen.device)
            if direction == "video-to-text":
                chosen = own[chosen[own.unique()]]
                own = own.unique()
            found = (chosen == own[:, None]).any(1).double()
            recalls[f"recall of the {self.candidates} candidates, {direction}"] = 100.0 * float(found.mean())
            if self._reranked is not None:
                first = (chosen[:, 0] == own).double().mean()
                recalls[f"R@1 before reranking, {direction}"] = 100.0 * float(first)
        if self._reranked is not None:
            recalls["reranked pairs (number)"] = len(self._reranked.keys)
            recalls["time per reranked pair (s)"] = self._reranked.seconds
        return recalls


class UnscoredPairs(ScoreSource):
    """Blocks of a method without scores, from which `TwoStage` scores only the candidates."""

    def __init__(self, pairs: PairScores) -> None:
        super().__init__(pairs.queries, pairs.gallery, pairs.device, pairs.shard)
        self.pairs = pairs

    @override
    def blocks(self) -> Iterator[Block]:
        for columns in self.pairs.video_blocks():
            for rows, _ in self.pairs.text_blocks:
                shape = rows.stop - rows.start, columns.stop - columns.start
                yield Block(torch.zeros((), device=self.device).expand(shape), rows, columns)


def nearest(queries: Tensor, gallery: Tensor, count: int, queries_per_block: int = QUERIES_PER_BLOCK) -> Tensor:
    """Return the indices (Q, k) of the gallery vectors (G, D) nearest to each query (Q, D): the first stage."""
    directions = unit(gallery).T
    blocks = [unit(block) @ directions for block in queries.split(queries_per_block)]
    return torch.cat([block.topk(min(count, len(gallery)), dim=1).indices for block in blocks])


def score_candidates(
    score: Callable[[TextFeatures, VideoFeatures], Scores],
    text: TextFeatures,
    video: VideoFeatures,
    candidates: Tensor,
    videos_per_block: int = VIDEOS_PER_BLOCK,
    direction: Direction = "text-to-video",
    share: slice | None = None,
) -> Tensor:
    """Score each query against its candidates (Q, k), in blocks of few videos: the second stage.

    Candidates with videos outside the `share` of a process score 0.
    """
    texts = torch.arange(candidates.numel()) // candidates.shape[1]
    videos = candidates.flatten().cpu()
    if direction == "video-to-text":
        texts, videos = videos, texts
    videos, order = videos.sort(stable=True)
    share = share or slice(0, len(video))
    starts = [*range(share.start, share.stop, videos_per_block), share.stop]
    places = torch.searchsorted(videos, torch.tensor(starts)).tolist()
    found = text.sentence.new_zeros(candidates.numel())
    for (start, stop), (first, last) in zip(pairwise(starts), pairwise(places), strict=True):
        if first < last:
            rows, place = texts[order[first:last]].unique(return_inverse=True)
            scores = score(text[rows], video[start:stop]).similarity
            found[order[first:last]] = scores[place, videos[first:last] - start].to(found)
    return found.view(candidates.shape)


def _candidate_scores(source: PairScores, chosen: Tensor, direction: Direction) -> Tensor:
    """Return the method's scores of all queries with their candidates, (Q, k), summed over the processes' videos."""

    def score(text: TextFeatures, video: VideoFeatures) -> Scores:
        with torch.autocast(source.device.type, enabled=False):
            scores: Scores = source.score(text.to(source.device).float(), video.to(source.device).float())  # type: ignore[call-arg]
        return scores

    shard = source.shard
    share = slice(*(source.gallery * place // shard.world for place in (shard.rank, shard.rank + 1)))
    # If few texts share a video, scoring several videos at a time would score many unneeded pairs.
    at_a_time = VIDEOS_PER_BLOCK if source.queries <= VIDEOS_PER_BLOCK * chosen.shape[1] else 1
    scores = score_candidates(score, source.texts, source.videos, chosen, at_a_time, direction, share)
    scores = shard.sum(scores.to(source.device))
    if scores.isnan().any():
        raise UserError(f"{int(scores.isnan().sum())} of {scores.numel()} candidates' scores are NaN")
    return scores


def _keys(candidates: Tensor, source: PairScores, direction: Direction) -> Tensor:
    """Return the keys (Q, k) of the pairs of queries and candidates: video * N + text."""
    queries = torch.arange(len(candidates))[:, None]
    candidates = candidates.cpu()
    texts, videos = (queries, candidates) if direction == "text-to-video" else (candidates, queries)
    return videos * source.queries + texts
