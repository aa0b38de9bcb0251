"""Two-stage retrieval: candidates by indexable cosines, reranked by a score of pairs (GARE, App. I)."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit

QUERIES_PER_BLOCK = 1024
VIDEOS_PER_BLOCK = 16


def nearest(queries: Tensor, gallery: Tensor, count: int, queries_per_block: int = QUERIES_PER_BLOCK) -> Tensor:
    """Return the indices (Q, k) of the gallery vectors (G, D) nearest to each query (Q, D): the first stage."""
    if count < 1:
        raise UserError(f"two-stage retrieval needs at least 1 candidate, not {count}")
    directions = unit(gallery).T
    blocks = [unit(block) @ directions for block in queries.split(queries_per_block)]
    return torch.cat([block.topk(min(count, len(gallery)), dim=1).indices for block in blocks])


def score_candidates(
    score: Callable[[TextFeatures, VideoFeatures], Scores],
    text: TextFeatures,
    video: VideoFeatures,
    candidates: Tensor,
    videos_per_block: int = VIDEOS_PER_BLOCK,
) -> Tensor:
    """Score each text against its candidates (N, k), in blocks of few videos: the second stage.

    Candidates outside the rows of `video` score 0.
    """
    found = text.sentence.new_zeros(candidates.numel())
    video_of, order = candidates.flatten().sort(stable=True)
    starts = torch.arange(0, len(video) + videos_per_block, videos_per_block, device=candidates.device)
    ends = torch.searchsorted(video_of, starts.clamp(max=len(video))).tolist()
    for block, (first, last) in enumerate(pairwise(ends)):
        if first == last:
            continue
        start, asked = block * videos_per_block, order[first:last]
        rows, place = (asked // candidates.shape[1]).unique(return_inverse=True)
        scores = score(text[rows], video[start : start + videos_per_block]).similarity
        found[asked] = scores[place, video_of[first:last] - start].to(found.dtype)
    return found.view(candidates.shape)


def candidate_recall(found: Tensor, own: Tensor) -> float:
    """Return the percentage of queries whose own video (Q,) is among the videos of their candidates (Q, k)."""
    return 100.0 * float((found == own[:, None]).any(1).double().mean())
