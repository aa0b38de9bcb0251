"""Query scoring: A CLIP-Hitchhiker's Guide to Long Video Retrieval (Bain, Nagrani, Varol, Zisserman, 2022).

A video is, for every text anew, the mean of its frames weighted by a softmax of their similarity with that text.

Deviations:
- temperature of the weights: paper divides similarities by a temperature; here it is learnt from 0.1 on, our choice.
- lengths: paper weighs and averages embeddings; here all vectors are brought to length 1 before, our choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.ranges import Options, Positive


@dataclass
class QueryScoringOptions(Options):
    """How texts weigh frames.

    Attributes:
        temperature: what cosines are divided by before the softmax over frames; large ones give the mean of all.
        learnt: whether it trains from there on.
    """

    temperature: Positive = 0.1
    learnt: bool = True


@dataclass
class Queries(Record):
    """N texts as the head needs them: `directions` (N, D) of length 1."""

    directions: Tensor


@dataclass
class Frames(Record):
    """M videos as the head needs them: `directions` (M, F, D) of length 1, `mask` (M, F) True where there is one."""

    directions: Tensor
    mask: Tensor


class QueryScoringHead(PairHead):
    """Cosines (N, M) of texts with videos that are pooled for them.

    Args:
        dimension: D.
        frames: F.
        options: of the paper.
    """

    def __init__(self, dimension: int, frames: int, options: QueryScoringOptions) -> None:
        super().__init__(dimension, basis=frames)
        # One element, not zero dimensions, so that it can be sharded.
        start = torch.tensor([math.log(options.temperature)])
        self.log_temperature = nn.Parameter(start, requires_grad=options.learnt)

    def temperature(self) -> Tensor:
        """Return what cosines are divided by, a scalar."""
        return self.log_temperature.exp().sum()

    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[Queries, Frames]:
        """Bring N texts and the frames of M videos to length 1, once each."""
        return Queries(unit(text.sentence)), Frames(unit(video.frames), video.frame_mask)

    def weights(self, texts: Queries, videos: Frames) -> Tensor:
        """Return how much each frame counts for each text, (M, F, N, 1); padded ones count nothing."""
        cosines = self.of_texts(texts.directions, len(videos)).dot_frames(videos.directions)
        padded = ~videos.mask[:, :, None, None]
        logits = (cosines / self.temperature()).masked_fill(padded, torch.finfo(cosines.dtype).min)
        return logits.softmax(1)

    def score(self, texts: Queries, videos: Frames) -> Scores:
        """Return `similarity` (n, m) of any n texts and any m videos."""
        pooled = self.form.mix(self.weights(texts, videos), videos.directions).unit()
        return Scores(pooled.dot(texts.directions.unsqueeze(1))[:, :, 0, 0].T)


class QueryScoring(RetrievalModule):
    """Every text looks for itself in the frames of every video.

    Args:
        encoder: media to features.
        query_scoring: the options of the paper.
        **options: shared by all methods; see `RetrievalModule`.
    """

    def __init__(self, encoder: Encoder, query_scoring: QueryScoringOptions | None = None, **options: Any) -> None:
        super().__init__(encoder, **options)
        head = QueryScoringHead(encoder.dimension, self.frames, query_scoring or QueryScoringOptions())
        self.head = head.within(self.evaluation_config.memory_gib)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos: `similarity` (N, M), cosines."""
        return self.head(text, video)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts: the sentence alone is read."""
        return text.without_words()

    def compact_video(self, video: VideoFeatures) -> VideoFeatures:
        """Drop all but the frames of M videos."""
        return VideoFeatures(video.frames, video.frame_mask)
