"""Scoring all pairs block by block, so that memory stays within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from tvr_lightning.features import Record, Scores
from tvr_lightning.pairwise.once import persisting

T = TypeVar("T", bound=Record)
V = TypeVar("V", bound=Record)


def score_in_blocks(
    score: Callable[[T, V], Scores],
    text: T,
    video: V,
    pair_bytes: int,
    budget: int = 64 * 2**20,
    few: Literal["video", "text"] = "video",
) -> Scores:
    """Score N texts against M videos in blocks of few videos and, as far as they fit, all texts.

    Few videos at a time and all texts, because what belongs to a video (its mapped basis, its Gram matrix) is then
    prepared once; where it belongs to a text, few texts and all videos. With gradients on and more than one block, each
    block is computed anew in the backward pass, so that only one block's intermediate tensors live at a time; random
    numbers are drawn alike both times.

    Args:
        score: scores any n texts against any m videos; its results must not depend on the other items of a block.
        text: N texts, prepared as `score` takes them.
        video: M videos, prepared as `score` takes them.
        pair_bytes: memory that one pair takes while it is scored, in bytes.
        budget: memory that one block may take, in bytes; a single pair is always scored.
        few: the side of which a block has few items.

    Returns:
        Scores of shape (N, M), as `score` would give in one piece.

    Raises:
        ValueError: `pair_bytes` or `budget` is not positive, or there is no text or no video.

    Example:
        >>> from tvr_lightning.features import TextFeatures, VideoFeatures
        >>> text = TextFeatures(torch.eye(3), torch.eye(3).unsqueeze(1), torch.ones(3, 1, dtype=torch.bool))
        >>> video = VideoFeatures(torch.eye(3).unsqueeze(1), torch.ones(3, 1, dtype=torch.bool))
        >>> score_in_blocks(lambda t, v: Scores(t.sentence @ v.frames[:, 0].T), text, video, 8, budget=16).similarity
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    if pair_bytes < 1 or budget < 1:
        raise ValueError(f"score_in_blocks: pair_bytes ({pair_bytes}) and budget ({budget}) must be positive")
    if not len(text) or not len(video):
        raise ValueError(f"score_in_blocks: nothing to score with {len(text)} texts and {len(video)} videos")
    pairs = max(budget // pair_bytes, 1)
    counts = (len(text), len(video)) if few == "video" else (len(video), len(text))
    many_step = min(counts[0], pairs)
    few_step = max(min(counts[1], pairs // many_step), 1)
    text_step, video_step = (many_step, few_step) if few == "video" else (few_step, many_step)
    whole = text_step == len(text) and video_step == len(video)
    texts = [text] if text_step == len(text) else [text[i : i + text_step] for i in range(0, len(text), text_step)]
    starts = range(0, len(video), video_step)
    one_piece = [side for side, pieces in ((text, len(texts)), (video, len(starts))) if pieces == 1 and not whole]
    kept = [tensor for side in one_piece for tensor in side.tensors()]  # they meet every block
    columns = []
    with persisting(kept, len(texts) * len(starts)):
        for start in starts:
            block = video if len(starts) == 1 else video[start : start + video_step]
            if torch.is_grad_enabled() and not whole:
                rows = [_recomputed(score, some, block) for some in texts]
            else:
                rows = [score(some, block) for some in texts]
            columns.append(_joined(rows, dim=0))
    return _joined(columns, dim=1)


def _recomputed(score: Callable[[T, V], Scores], text: T, video: V) -> Scores:
    result = checkpoint(score, text, video, use_reentrant=False)
    assert isinstance(result, Scores)
    return result


def _joined(blocks: list[Scores], dim: int) -> Scores:
    if len(blocks) == 1:
        return blocks[0]
    parts = {name: torch.cat([block.parts[name] for block in blocks], dim) for name in blocks[0].parts}
    return Scores(torch.cat([block.similarity for block in blocks], dim), parts)
