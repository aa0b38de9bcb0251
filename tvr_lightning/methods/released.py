"""The released evaluations of T-MASS and GAID, which pool and fuse every video for its own caption.

Scores then depend on the matching caption, so ground truth leaks into the ranking. Only `protocol: as-released` uses
this module, and every result is marked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.stochastic import drawn_text, trial_cosines
from tvr_lightning.pairwise import DensePairVectors, PairFrames

if TYPE_CHECKING:
    from tvr_lightning.methods.gaid.model import GAIDHead
    from tvr_lightning.methods.tmass import TMASSHead
    from tvr_lightning.methods.xpool import PoolingHead, Query


@dataclass
class Described(FeatureBatch):
    """M videos with the queries of their own captions.

    Attributes:
        video: Features of the M videos.
        own: Queries of their captions, one each.
    """

    video: VideoFeatures
    own: Query


def score_tmass(
    head: TMASSHead, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures, draws: Tensor
) -> Scores:
    """Score with the sample that the query's pooled video selects, against the caption's pooled video.

    T-MASS, modules/metrics.py, `sim_matrix_inference_stochastic`.
    """

    def score(query: Query, described: Described) -> Scores:
        trials, radius = head.trials(query, described.video, draws.to(query.sentence))
        drawn = drawn_text(query.sentence, radius, draws.to(query.sentence), trials.argmax(1))
        return _cosines(drawn, own_pooled(head, described.own, described.video, described.video.frames))

    return _in_blocks(head, score, text, video, own_text)


def score_gaid(
    head: GAIDHead, text: TextFeatures, video: VideoFeatures, own_text: TextFeatures, draws: Tensor | None
) -> Scores:
    """Score N texts against videos that are also fused for their captions.

    GAID, model/clip_stochastic.py, modules/metrics.py.

    Args:
        head: Head of GAID.
        text: Features of N texts.
        video: Features of M videos, with audio (M, F, D) for fusion.
        own_text: Features of the caption of each video.
        draws: Samples (K, D) of perturbation `STP`; None for other perturbations.
    """

    def score(query: Query, described: Described) -> Scores:
        own, few = described.own, described.video
        fused = head.fused(own.sentence, few, paired=True)
        target, sentence = own_pooled(head, own, few, fused), head.normalized(query.sentence)
        if head.radius is None:
            return _cosines(sentence, target)
        std = head.std(fused.cosine(query.sentence), few.frame_mask.unsqueeze(1))
        if draws is None:
            return _cosines(head.perturbed(sentence, std), target)
        pooled = head.pooled(query, few, fused).materialize()[:, :, 0].transpose(0, 1)
        best = trial_cosines(sentence, std, pooled, draws.to(sentence)).argmax(1)
        return _cosines(drawn_text(sentence, std, draws.to(sentence), best), target)

    return _in_blocks(head, score, text, video, own_text, extra=4 * head.dimension)  # the deviation of every pair


def own_pooled(head: PoolingHead, own: Query, video: VideoFeatures, frames: Tensor | PairFrames) -> Tensor:
    """Return the frames of each video pooled for its own text, (M, D)."""
    alone = DensePairVectors(own.queries.unsqueeze(1))  # (M, 1, 1, D): one text per video
    return head.attention(alone, frames, video.frame_mask).materialize()[0, :, 0]


def _in_blocks(
    head: PoolingHead,
    score: Callable[[Query, Described], Scores],
    text: TextFeatures,
    video: VideoFeatures,
    own_text: TextFeatures,
    extra: int = 0,
) -> Scores:
    with torch.autocast(text.sentence.device.type, enabled=False):
        queries, videos = head.prepare(text.float(), video.float())
        own, _ = head.prepare(own_text.float(), videos)
        return head.in_blocks(score, queries, Described(videos, own), extra)


def _cosines(texts: Tensor, target: Tensor) -> Scores:
    """Return cosines of texts (N, D) or (M, N, D) with a vector (M, D) per video."""
    return Scores((unit(texts) * unit(target).unsqueeze(1)).sum(-1).T)
