"""DSL: Improving Video-Text Retrieval by Multi-Stream Corpus Alignment and Dual Softmax Loss (Cheng et al., 2021).

Only the dual softmax loss, on CLIP4Clip's mean pooling, without the paper's streams of experts.

Deviations:
- factor: released multiplies the prior by B, so that a uniform prior changes nothing; here as released.
- temperature of the prior: released divides the logits by 1000; here as released (`prior_temperature`).
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
    """Weight each logit by a softmax over the queries of the batch, the prior.

    Args:
        logits: Scores of B texts and their B videos, divided by the contrastive temperature, (B, B).
        queries: Dimension of the queries; the prior is a softmax over it.
        temperature: Divisor of the logits in the prior.

    Returns:
        Weighted logits (B, B), equal to the logits if the prior is uniform.
    """
    return logits * (logits / temperature).softmax(queries) * len(logits)


class DualSoftmaxLoss(RetrievalModule):
    """CLIP4Clip's mean pooling, trained with the dual softmax loss.

    Args:
        encoder: Encoder of texts and videos.
        prior_temperature: Divisor of the logits in the prior (released: 1000).
        **options: Options of `RetrievalModule`.

    Raises:
        ValueError: The temperature is not positive.
    """

    def __init__(self, encoder: Encoder, prior_temperature: float = 1000.0, **options: Any) -> None:
        super().__init__(encoder, **options)
        if prior_temperature <= 0:
            raise ValueError(f"prior_temperature is {prior_temperature}; it must be above 0")
        self.prior_temperature = prior_temperature

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Return the cosines `similarity` (N, M) of N texts and M videos."""
        return Scores(mean_pooling_similarity(text, video))

    def losses(self, pairs: PairedFeatures) -> dict[str, Tensor]:
        """Return InfoNCE of B matching pairs; each direction uses the prior of the other."""
        logits = self.contrastive_logits(self.temperature() * self.score(pairs.text, pairs.video).similarity)
        text_to_video = revised(logits, queries=0, temperature=self.prior_temperature)
        video_to_text = revised(logits, queries=1, temperature=self.prior_temperature)
        return {"dual_softmax": info_nce(text_to_video, video_to_text)}
