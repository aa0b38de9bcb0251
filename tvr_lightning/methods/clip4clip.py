"""CLIP4Clip: An Empirical Study of CLIP for End to End Video Clip Retrieval (Luo et al., Neurocomputing 2022).

The similarity heads of the paper on CLIP's sentence and frame vectors. Follows the released code (ArrowLuo/CLIP4Clip,
modules/modeling.py); GARE, TC-MGC and NCL build on it.

Deviations:
- ties: released counts a tied query several times; here they are ranked by their expectation.
- gradient of the gather: released each device's own slice (`gather: own-slice`); here the exact one.
- precision: released CLIP in float16 with float32 masters (`encoder_precision: fp16-master`); here float32.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cross import CrossEncoder, cross_encoder
from tvr_lightning.layers.temporal import TemporalLSTM, temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.optim import OptimizerConfig

SimilarityHeader = Literal["meanP", "seqLSTM", "seqTransf", "tightTransf"]


def masked_mean(frames: Tensor, frame_mask: Tensor) -> Tensor:
    """Mean of the real frames of each video (CLIP4Clip, `_mean_pooling_for_similarity_visual`).

    Args:
        frames: (M, F, D).
        frame_mask: (M, F), True where there is a frame.

    Returns:
        (M, D); zero for a video without frames.
    """
    mask = frame_mask.to(frames.dtype).unsqueeze(-1)
    return (frames * mask).sum(1) / mask.sum(1).clamp(min=1.0)


def mean_pooling_similarity(text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Cosine of each sentence with the mean of each video's normalised frames (CLIP4Clip, Eq. 2, "loose" heads).

    Returns:
        (N, M) cosines.
    """
    pooled = normalize(masked_mean(normalize(video.frames, dim=-1), video.frame_mask), dim=-1)
    return normalize(text.sentence, dim=-1) @ pooled.T


class CLIP4Clip(RetrievalModule):
    """CLIP4Clip with a parameter-free (meanP), sequential (seqLSTM, seqTransf) or tight (tightTransf) header.

    With tightTransf the similarity is the cross encoder's logit, trained without a temperature as released.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        similarity_header: `meanP` pools CLIP's frames; `seqTransf` and `seqLSTM` first relate them over time;
            `tightTransf` reads each pair of sentence and frames with a cross encoder, which costs a transformer per
            pair.
        temporal_layers: blocks of seqTransf or tightTransf (released: 4, `cross_num_hidden_layers`) or layers of
            seqLSTM (released: 1).
        cross_dropout: on the tokens of tightTransf in training (released: 0.1).

    Raises:
        ValueError: an option that the similarity header does not use, or a header of another name.
    """

    def __init__(
        self,
        encoder: Encoder,
        optimizer: OptimizerConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        words: int = 32,
        frames: int = 12,
        gather: Gather = "global",
        contrast: ContrastiveLearning | None = None,
        similarity_header: SimilarityHeader = "meanP",
        temporal_layers: int | None = None,
        cross_dropout: float | None = None,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        if similarity_header not in get_args(SimilarityHeader):
            raise ValueError(
                f"similarity_header is {similarity_header!r}; expected one of {', '.join(get_args(SimilarityHeader))}"
            )
        if similarity_header == "meanP" and temporal_layers is not None:
            raise ValueError("similarity_header: meanP has no temporal layers; drop temporal_layers or use seqTransf")
        if temporal_layers is not None and temporal_layers < 1:
            raise ValueError(f"temporal_layers is {temporal_layers}; expected at least 1, or similarity_header: meanP")
        if similarity_header != "tightTransf" and cross_dropout is not None:
            raise ValueError(
                f"cross_dropout belongs to similarity_header: tightTransf; drop it with similarity_header: "
                f"{similarity_header}"
            )
        self.similarity_header = similarity_header
        self.temporal: nn.Module | None = None
        self.cross: CrossEncoder | None = None
        if similarity_header == "seqTransf":
            self.temporal = temporal_transformer(encoder, temporal_layers or 4, frames)
        elif similarity_header == "seqLSTM":
            self.temporal = TemporalLSTM(encoder.dimension, layers=temporal_layers or 1)
        elif similarity_header == "tightTransf":
            self.cross = cross_encoder(
                encoder, temporal_layers or 4, frames, 0.1 if cross_dropout is None else cross_dropout
            )
            # No loss depends on it, and distributed training refuses parameters that wait for a gradient.
            self.temperature.requires_grad_(False)

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        """Relate the frames over time where the header does; frames (M, F, D) in and out."""
        if self.temporal is None:
            return video
        return dataclasses.replace(video, frames=self.temporal(video.frames, video.frame_mask))

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos.

        Returns:
            `similarity` (N, M): cosines of sentences and pooled videos, or with tightTransf the cross encoder's logits,
            which take no temperature.
        """
        if self.cross is not None:
            return Scores(self.cross(text.sentence, video.frames, video.frame_mask))
        return Scores(mean_pooling_similarity(text, video))

    def logits(self, similarity: Tensor) -> Tensor:
        """Return what the released loss sees, (N, M): scaled cosines; tightTransf's logits as is."""
        return similarity if self.cross is not None else self.temperature() * similarity

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts: every header reads the sentence alone."""
        return text.without_words()

    def compact_video(self, video: VideoFeatures) -> VideoFeatures:
        """Replace the frames of M videos by their pooled vector (M, 1, D), which scores alike; not with tightTransf."""
        if self.cross is not None:
            return video
        pooled = normalize(masked_mean(normalize(video.frames, dim=-1), video.frame_mask), dim=-1).unsqueeze(1)
        return VideoFeatures(pooled, torch.ones_like(pooled[..., 0], dtype=torch.bool))

    def score_temperature(self) -> float:
        """Return gamma, what the loss divides scores by; 1 with tightTransf, whose scores are logits."""
        return 1.0 if self.cross is not None else super().score_temperature()
