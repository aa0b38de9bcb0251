"""DSL: Improving Video-Text Retrieval by Multi-Stream Corpus Alignment and Dual Softmax Loss (Cheng et al., 2021).

The dual softmax loss alone, on CLIP4Clip's mean pooling; the paper's streams of experts are not here.

Deviations:
- factor: released multiplies the prior by B, so that an even prior changes nothing; here as released.
- temperature of the prior: released divides logits by 1000; here as released (`prior_temperature`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import PairedFeatures, Scores, TextFeatures, VideoFeatures
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.clip4clip import mean_pooling_similarity
from tvr_lightning.training.losses import info_nce


def revised(logits: Tensor, queries: int, temperature: float) -> Tensor:
    """Weigh every logit by how much of its candidate's attention its query has in the batch.

    Args:
        logits: (B, B) scores of B texts against their B videos, times the inverse temperature of the contrast.
        queries: dimension that the queries lie on; the prior is a softmax over it.
        temperature: what the logits are divided by inside the prior.

    Returns:
        (B, B); the logits themselves where the prior is even.
    """
    return logits * (logits / temperature).softmax(queries) * len(logits)


class DualSoftmaxLoss(RetrievalModule):
    """CLIP4Clip's mean pooling, trained so that a match must be the best in both directions at once.

    Args:
        encoder: media to features.
        prior_temperature: what the logits are divided by inside the prior (released: 1000).
        **options: shared by all methods; see `RetrievalModule`.

    Raises:
        ValueError: the temperature is not positive.
    """

    def __init__(self, encoder: Encoder, prior_temperature: float = 1000.0, **options: Any) -> None:
        super().__init__(encoder, **options)
        if prior_temperature <= 0:
            raise ValueError(f"prior_temperature is {prior_temperature}; it must be above 0")
        self.prior_temperature = prior_temperature

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos: `similarity` (N, M), cosines."""
        return Scores(mean_pooling_similarity(text, video))

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return InfoNCE on revised logits of B matching pairs, each direction with the prior of the other."""
        logits = self.contrastive_logits(self.temperature() * self.score(pairs.text, pairs.video).similarity)
        text_to_video = revised(logits, queries=0, temperature=self.prior_temperature)
        video_to_text = revised(logits, queries=1, temperature=self.prior_temperature)
        return {"dual_softmax": info_nce(text_to_video, video_to_text)}
