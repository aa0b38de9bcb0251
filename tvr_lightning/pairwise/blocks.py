"""Block-wise scores of all pairs within a memory budget."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch, Scores

T = TypeVar("T", bound=FeatureBatch)
V = TypeVar("V", bound=FeatureBatch)
FEWEST = 8
"""Minimum number of items in a block on the side with few items, if a few texts fit for each of them."""
VECTOR = 16
"""Multiple of the SIMD width of CPUs, so that rows of this length have no remainder."""


def score_in_blocks(
    score: Callable[[T, V], Scores],
    text: T,
    video: V,
    pair_bytes: int,
    budget: int = 64 * 2**20,
    few: Literal["video", "text", "both"] = "video",
    kept: int = 0,
) -> Scores:
    """Score N texts against M videos in blocks within a memory budget in bytes; equal to `score` of all pairs at once.

    Blocks have few videos and, if they fit, all texts, so that what depends only on a video is computed once; `few`
    names the side with few items instead. With gradients, if all pairs need more than `kept` bytes, blocks are
    recomputed in the backward pass with the same random numbers.

    Raises:
        UserError: There is no text or no video, or the budget is too small for one pair.
    """
    if not len(text) or not len(video):
        raise UserError(f"score_in_blocks: nothing to score with {len(text)} texts and {len(video)} videos")
    if budget < pair_bytes:
        raise UserError(
            f"scores of one pair need {pair_bytes} bytes, but half of the memory budget is {budget} bytes. Increase "
            "evaluation.memory_gib, or leave it out"
        )
    anew = torch.is_grad_enabled() and len(text) * len(video) * pair_bytes > kept
    budget = max(budget, kept) if anew else budget
    text_step, video_step = _steps(len(text), len(video), budget // pair_bytes, few)
    anew = anew and (text_step < len(text) or video_step < len(video))
    run: Callable[[T, V], Scores] = partial(checkpoint, score, use_reentrant=False) if anew else score
    texts = [text[i : i + text_step] for i in range(0, len(text), text_step)]
    videos = [video[i : i + video_step] for i in range(0, len(video), video_step)]
    columns = [_joined([run(some, few_videos) for some in texts], dim=0) for few_videos in videos]
    return _joined(columns, dim=1)


def _steps(texts: int, videos: int, pairs: int, few: Literal["video", "text", "both"]) -> tuple[int, int]:
    """Return the numbers of texts and videos in a block of `pairs` pairs."""
    if few == "video":
        # Enough videos per block to make reading the vectors of all texts worthwhile.
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


def _joined(blocks: list[Scores], dim: int) -> Scores:
    if len(blocks) == 1:
        return blocks[0]
    parts = {name: torch.cat([block.parts[name] for block in blocks], dim) for name in blocks[0].parts}
    return Scores(torch.cat([block.similarity for block in blocks], dim), parts)
