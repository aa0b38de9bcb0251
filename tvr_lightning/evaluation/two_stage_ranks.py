"""Ranks of two-stage retrieval at the cost of two stages: the method scores only the candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.ranks import Ranks, group_maximum
from tvr_lightning.evaluation.sources import Shard
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.pairwise.two_stage import VIDEOS_PER_BLOCK, score_candidates

ROWS = 256
"""Maximum number of queries compared with the whole gallery at a time, if their match is not a candidate."""


def text_ranks(
    source: PairScores, video_of_text: Tensor, found: Tensor, vectors: tuple[Tensor, Tensor], budget: int
) -> Ranks:
    """Rank each text's video by the method if it is a candidate, otherwise after the candidates by the first stage.

    Args:
        source: Scores of N texts against M videos by the method; its blocks are not computed.
        video_of_text: Column of each text's video, (N,) int64.
        found: Candidates of each text, (N, k) int64.
        vectors: First-stage vectors of texts and videos, (N, D) and (M, D).
        budget: Memory budget for a comparison with the whole gallery, in bytes.

    Returns:
        Ranks of the N texts by row, the same on every process.

    Raises:
        UserError: A score is NaN.
    """
    scores = _candidate_scores(source, found, texts_are_queries=True)
    match = found == video_of_text[:, None]
    better, tied = _counts(scores, match, torch.ones_like(match))
    texts, videos = (unit(part).double() for part in vectors)
    missing = (~match.any(1)).nonzero().flatten()
    for rows in _shares(missing, source.shard, budget, source.gallery):
        cosine = (texts[rows] @ videos.T).scatter(1, found[rows], float("-inf"))
        own = cosine.gather(1, video_of_text[rows, None])
        better[rows] = found.shape[1] + (cosine > own).sum(1)
        tied[rows] = (cosine == own).sum(1)
    better, tied = _complete(better, missing, source.shard), _complete(tied, missing, source.shard)
    return Ranks(better, tied, torch.arange(source.queries, device=source.device))


def video_ranks(
    source: PairScores, video_of_text: Tensor, found: Tensor, vectors: tuple[Tensor, Tensor], budget: int
) -> Ranks:
    """Rank each captioned video among the captioned videos, with a video represented by its best caption.

    Args:
        source: Scores of N texts against M videos by the method; its blocks are not computed.
        video_of_text: Column of each text's video, (N,) int64.
        found: Candidate texts of each video, (M, k) int64.
        vectors: First-stage vectors of texts and videos, (N, D) and (M, D).
        budget: Memory budget for a comparison with the whole gallery, in bytes.

    Returns:
        Ranks of the videos that have texts by column, the same on every process.

    Raises:
        UserError: A score is NaN.
    """
    videos, group = torch.unique(video_of_text, return_inverse=True)
    scores = _candidate_scores(source, found, texts_are_queries=False)[videos]
    # Sorted by score and then, keeping that order, by group: the first of each group is its best caption.
    scores, order = scores.sort(dim=1, descending=True)
    groups, by_group = group[found[videos]].gather(1, order).sort(dim=1, stable=True)
    scores = scores.gather(1, by_group)
    first = torch.ones_like(groups, dtype=torch.bool)
    first[:, 1:] = groups[:, 1:] != groups[:, :-1]
    match = first & (groups == torch.arange(len(videos), device=groups.device)[:, None])
    better, tied = _counts(scores, match, first)
    of_texts, of_videos = (unit(part).double() for part in vectors)
    missing = (~match.any(1)).nonzero().flatten()
    for rows in _shares(missing, source.shard, budget, source.queries):
        cosine = of_texts @ of_videos[videos[rows]].T
        best = group_maximum(cosine, group, len(videos)).T.scatter(1, groups[rows], float("-inf"))
        own = best.gather(1, rows[:, None])
        better[rows] = first[rows].sum(1) + (best > own).sum(1)
        tied[rows] = (best == own).sum(1)
    better, tied = _complete(better, missing, source.shard), _complete(tied, missing, source.shard)
    return Ranks(better, tied, videos)


def _counts(scores: Tensor, match: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Count the candidates (Q, k) that score higher than and equal to the match, if the match is a candidate."""
    own = scores.masked_fill(~match, float("-inf")).amax(1, keepdim=True)
    return ((scores > own) & counted).sum(1), ((scores == own) & counted).sum(1)


def _shares(rows: Tensor, shard: Shard, budget: int, gallery: int) -> tuple[Tensor, ...]:
    """Return this process's share of rows, in blocks small enough for a comparison with the whole gallery."""
    mine = rows[shard.rank :: shard.world]
    at_a_time = max(1, min(ROWS, budget // (32 * max(gallery, 1))))  # two float64 matrices and temporary tensors
    return mine.split(at_a_time) if len(mine) else ()


def _complete(counts: Tensor, missing: Tensor, shard: Shard) -> Tensor:
    """Combine the counts of the missing rows from all processes; all processes already have the other counts."""
    if shard.world == 1:
        return counts
    mine = torch.zeros_like(counts)
    mine[missing[shard.rank :: shard.world]] = counts[missing[shard.rank :: shard.world]]
    total = shard.sum(mine)
    counts[missing] = total[missing]
    return counts


def _candidate_scores(source: PairScores, found: Tensor, texts_are_queries: bool) -> Tensor:
    """Return the method's scores of all queries with their candidates, (Q, k), summed over the processes' videos."""

    def score(text: TextFeatures, video: VideoFeatures) -> Scores:
        with torch.autocast(source.device.type, enabled=False):
            scores: Scores = source.score(text.to(source.device).float(), video.to(source.device).float())  # type: ignore[call-arg]
        return scores

    shard, (queries, count) = source.shard, found.shape
    first, last = (source.gallery * place // shard.world for place in (shard.rank, shard.rank + 1))
    # If few texts share a video, scoring several videos at a time would score many unneeded pairs.
    at_a_time = VIDEOS_PER_BLOCK if source.queries <= VIDEOS_PER_BLOCK * count else 1
    if texts_are_queries:
        own = source.videos[first:last]
        scores = score_candidates(score, source.texts, own, found - first, at_a_time).to(source.device)
    else:
        scores = torch.zeros(queries, count, device=source.device)
        for start in range(first, last, at_a_time):
            rows = slice(start, min(start + at_a_time, last))
            asked, place = found[rows].unique(return_inverse=True)
            block = score(source.texts[asked], source.videos[rows]).similarity
            scores[rows] = block.T.gather(1, place).to(scores.dtype)
    scores = shard.sum(scores)
    if scores.isnan().any():
        raise UserError(f"{int(scores.isnan().sum())} of {scores.numel()} candidates' scores are NaN")
    return scores
