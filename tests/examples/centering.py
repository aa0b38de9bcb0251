"""Centering Similarity Measures to Reduce Hubs (Suzuki et al., EMNLP 2013), with means that follow the training.

Subtracts the mean text from texts and the mean video from videos before the cosine, on CLIP4Clip's mean pooling.

Deviations:
- mean: paper the mean of all vectors of the dataset; here an exponential moving average of the training batches, so
  that the score needs no test data.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.option_types import Share
from tvr_lightning.training.distributed import gather_record


class Centering(RetrievalModule):
    """Cosines of centered texts and videos.

    Args:
        encoder: Encoder of texts and videos.
        momentum: Weight of the previous mean in an update.
        **options: Options of `RetrievalModule`.
    """

    means: Tensor

    def __init__(self, encoder: Encoder, momentum: Share = 0.9, **options: Any) -> None:
        super().__init__(encoder, **options)
        self.momentum = momentum
        self.register_buffer("means", torch.zeros(2, encoder.dimension))  # texts, videos; saved in checkpoints

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Return the cosines `similarity` (N, M) of N texts and M videos."""
        texts = text.sentence - self.means[0]
        videos = masked_mean(video.frames, video.frame_mask) - self.means[1]
        return Scores(cosine_similarity(texts[:, None], videos, dim=-1))

    def update_state(self, pairs: PairedFeatures) -> None:
        """Move the means towards those of the pairs of a step."""
        super().update_state(pairs)
        if self.gather == "none":
            pairs = gather_record(pairs)
        texts = pairs.text.sentence.to(self.means.dtype).mean(0)
        videos = masked_mean(pairs.video.frames.to(self.means.dtype), pairs.video.frame_mask).mean(0)
        self.means.lerp_(torch.stack([texts, videos]), 1 - self.momentum)
