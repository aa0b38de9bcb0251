"""The released evaluations of T-MASS and GAID, which pool, and in GAID also fuse, every video for its own caption.

Scores then depend on the matching caption, so ground truth leaks into the ranking. Only `protocol: as-released` uses
this module, and every result is marked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.xpool import Query, XPoolHead
from tvr_lightning.pairwise import DensePairVectors, PairFrames


@dataclass
class CaptionedVideos(FeatureBatch):
    """Features of M videos, and the query of the caption of each."""

    video: VideoFeatures
    own: Query


def score_captioned(
    head: XPoolHead,
    score: Callable[[Query, CaptionedVideos], Scores],
    text: TextFeatures,
    video: VideoFeatures,
    own_text: TextFeatures,
    extra: int = 0,
) -> Scores:
    """Score N texts against M videos with their own captions (M), block by block, in at least float32.

    `score` scores n of the texts against m of the videos and needs `extra` elements of memory per pair.
    """
    with torch.autocast(text.sentence.device.type, enabled=False):
        queries, videos = head.prepare(text.float(), video.float())
        own, _ = head.prepare(own_text.float(), videos)
        return head.in_blocks(score, queries, CaptionedVideos(videos, own), extra)


def own_cosines(head: XPoolHead, texts: Tensor, videos: CaptionedVideos, frames: Tensor | PairFrames) -> Scores:
    """Return cosines (N, M) of texts (N, D) or (M, N, D) with the frames of each video pooled for its own caption."""
    alone = DensePairVectors(videos.own.queries.unsqueeze(1))  # (M, 1, 1, D): one text per video
    pooled = head.attention(alone, frames, videos.video.frame_mask).materialize()[0, :, 0]
    return Scores((unit(texts) * unit(pooled).unsqueeze(1)).sum(-1).T)
