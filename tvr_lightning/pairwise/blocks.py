"""Scoring all pairs block by block, so that memory stays within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from tvr_lightning.features import Record, Scores
from tvr_lightning.pairwise.once import persisting

T = TypeVar("T", bound=Record)
V = TypeVar("V", bound=Record)
FEWEST = 8
"""How many items a block has at least of the side of which it has few, where a few texts fit for each of them."""
VECTOR = 16
"""A multiple of the numbers that processors take at a time: rows of so many have no rest to treat one by one."""


def score_in_blocks(
    score: Callable[[T, V], Scores],
    text: T,
    video: V,
    pair_bytes: int,
    budget: int = 64 * 2**20,
    few: Literal["video", "text", "both"] = "video",
    kept: int = 0,
) -> Scores:
    """Score N texts against M videos in blocks of few videos and, as far as they fit beside eight of these, all texts.

    Few videos at a time and all texts, because what belongs to a video (its mapped basis, its Gram matrix) is then
    prepared once; where it belongs to a text, few texts and all videos; where nothing does and the similarities of the
    pairs' tokens take the time, few of both, which stay in the caches. With gradients on and more memory needed than
    may be kept, each of several blocks is computed anew in the backward pass, so that only one block's intermediate
    tensors live at a time; random numbers are drawn alike both times.

    Args:
        score: scores any n texts against any m videos; its results must not depend on the other items of a block.
        text: N texts, prepared as `score` takes them.
        video: M videos, prepared as `score` takes them.
        pair_bytes: memory that one pair takes while it is scored, in bytes.
        budget: memory that one block may take, in bytes; a single pair is always scored.
        few: the side of which a block has few items, or both.
        kept: memory that all blocks together may keep for the backward pass, in bytes, before they are computed anew;
            they are then of that size, since few large ones cost less.

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
    anew = torch.is_grad_enabled() and len(text) * len(video) * pair_bytes > kept
    budget = max(budget, kept) if anew else budget
    text_step, video_step = _steps(len(text), len(video), max(budget // pair_bytes, 1), few)
    anew = anew and (text_step < len(text) or video_step < len(video))
    texts = [text] if text_step == len(text) else [text[i : i + text_step] for i in range(0, len(text), text_step)]
    videos = (
        [video] if video_step == len(video) else [video[i : i + video_step] for i in range(0, len(video), video_step)]
    )
    columns = []
    with persisting([tensor for some in texts for tensor in some.tensors()], blocks=len(videos)):
        for few_videos in videos:
            with persisting(few_videos.tensors(), blocks=len(texts)):
                if anew:
                    rows = [_recomputed(score, few_texts, few_videos) for few_texts in texts]
                else:
                    rows = [score(few_texts, few_videos) for few_texts in texts]
            columns.append(_joined(rows, dim=0))
    return _joined(columns, dim=1)


def _steps(texts: int, videos: int, pairs: int, few: Literal["video", "text", "both"]) -> tuple[int, int]:
    """Return how many texts and how many videos a block of so many pairs takes."""
    if few == "video":
        # As many videos as make the products of their vectors with those of all texts worth reading the latter for.
        text_step = min(texts, pairs, max(pairs // min(FEWEST, videos), VECTOR))
        if VECTOR < text_step < texts:
            text_step -= text_step % VECTOR
        return text_step, max(min(videos, pairs // text_step), 1)
    if few == "text":
        return _steps(videos, texts, pairs, "video")[::-1]
    text_step = min(texts, math.isqrt(pairs))
    if text_step > VECTOR:
        text_step -= text_step % VECTOR
    video_step = min(videos, pairs // text_step)
    return min(texts, pairs // video_step), video_step


def _recomputed(score: Callable[[T, V], Scores], text: T, video: V) -> Scores:
    result = checkpoint(score, text, video, use_reentrant=False)
    assert isinstance(result, Scores)
    return result


def _joined(blocks: list[Scores], dim: int) -> Scores:
    if len(blocks) == 1:
        return blocks[0]
    parts = {name: torch.cat([block.parts[name] for block in blocks], dim) for name in blocks[0].parts}
    return Scores(torch.cat([block.similarity for block in blocks], dim), parts)
