"""Query scoring: A CLIP-Hitchhiker's Guide to Long Video Retrieval (Bain, Nagrani, Varol, Zisserman, 2022).

The vector of a video depends on the text: the mean of the frames,
weighted by a softmax of their similarity with it.

Deviations:
- temperature of the weights: paper divides similarities by a temperature; here learns it from 0.1 on, our choice.
- lengths: paper averages embeddings; here normalizes them to unit length first, our choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.option_types import Options, Positive


@dataclass
class QueryScoringOptions(Options):
    """Settings for weighting frames.

    Attributes:
        temperature: Divisor of the cosines before the softmax over frames. A large one gives the mean of all frames.
        learned: Whether the temperature is trained.
    """

    temperature: Positive = 0.1
    learned: bool = True


@dataclass
class Queries(FeatureBatch):
    """Unit vectors `directions` (N, D) of N texts."""

    directions: Tensor


@dataclass
class Frames(FeatureBatch):
    """Unit vectors `directions` (M, F, D) of the frames of M videos; `mask` (M, F) is True for real frames."""

    directions: Tensor
    mask: Tensor


class QueryScoringHead(PairHead):
    """Cosines (N, M) of texts and text-conditioned videos.

    Args:
        dimension: Dimension D of all vectors.
        frames: Number of frames F.
        options: Options of the paper.
    """

    def __init__(self, dimension: int, frames: int, options: QueryScoringOptions) -> None:
        super().__init__(dimension, basis=frames)
        # Shape (1,), not (), so that FSDP can shard it.
        start = torch.tensor([math.log(options.temperature)])
        self.log_temperature = nn.Parameter(start, requires_grad=options.learned)

    def temperature(self) -> Tensor:
        """Return the divisor of the cosines, a scalar."""
        return self.log_temperature.exp().sum()

    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[Queries, Frames]:
        """Normalize N texts and the frames of M videos to unit length."""
        return Queries(unit(text.sentence)), Frames(unit(video.frames), video.frame_mask)

    def weights(self, texts: Queries, videos: Frames) -> Tensor:
        """Return the weight of each frame for each text, (M, F, N, 1); padded frames have weight 0."""
        cosines = self.of_texts(texts.directions, len(videos)).dot_frames(videos.directions)
        padded = ~videos.mask[:, :, None, None]
        logits = (cosines / self.temperature()).masked_fill(padded, torch.finfo(cosines.dtype).min)
        return logits.softmax(1)

    def score(self, texts: Queries, videos: Frames) -> Scores:
        """Return `similarity` (n, m) of n texts and m videos."""
        pooled = self.form.mix(self.weights(texts, videos), videos.directions).unit()
        return Scores(pooled.dot(texts.directions.unsqueeze(1))[:, :, 0, 0].T)


class QueryScoring(RetrievalModule):
    """Query scoring on the features of an encoder.

    Args:
        encoder: Encoder of texts and videos.
        query_scoring: Options of the paper.
        **options: Options of `RetrievalModule`.
    """

    def __init__(self, encoder: Encoder, query_scoring: QueryScoringOptions | None = None, **options: Any) -> None:
        super().__init__(encoder, **options)
        head = QueryScoringHead(encoder.dimension, self.frames, query_scoring or QueryScoringOptions())
        self.head = head.within(self.evaluation_config.memory_gib)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Return the cosines `similarity` (N, M) of N texts and M videos."""
        return self.head(text, video)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts; the score uses only the sentence."""
        return text.without_words()

    def compact_video(self, video: VideoFeatures) -> VideoFeatures:
        """Keep only the frames of M videos."""
        return VideoFeatures(video.frames, video.frame_mask)
