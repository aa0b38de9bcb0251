"""X-Pool: Cross-Modal Language-Video Attention for Text-Video Retrieval (Gorti et al., CVPR 2022).

Follows the released code (layer6ai-labs/xpool, model/clip_transformer.py, modules/transformer.py, modules/metrics.py).
T-MASS and GAID build on X-Pool.

Deviations:
- padded frames: released has none, since short clips repeat their last frame; here padded frames are masked.
- captions: released pads to the longest caption of a batch; here zeros pad them to `words`.
- several captions per video: released scores them in a table padded with minus infinity; here scores each text and
  each video once and pairs them by index.
- pixels: released uses float32, resized without antialiasing; here the same (`data.init_args.antialias: false`), stored
  in float16, so that a value from 0 to 255 is off by at most 1/8.
- precision: released runs on PyTorch 1.8, which rounds the factors of products to TF32 on Ampere GPUs; here float32 on
  every GPU; `recipes/hardware/tf32.yaml` rounds them in training.
- last batch: released trains on one device, with an incomplete last batch; here the same on one device, while several
  repeat samples until they share them evenly, which changes the gradient of that step.
- selection: released selects the best mean of the last five test R@1, ten times per epoch; here uses the weights of the
  last step; `recipes/variants/select-on-test.yaml` selects the best test R@1.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.option_types import Count, Dropout, Options
from tvr_lightning.pairwise import PairFrames, Pairwise, TextConditionedAttention


@dataclass
class XPoolOptions(Options):
    """X-Pool's cross-attention between a text and the frames of a video (modules/transformer.py).

    Attributes:
        heads: number of attention heads.
        dropout: dropout rate of the elements of FC(h) in training.
    """

    heads: Count = 1
    dropout: Dropout = 0.3


@dataclass
class Query(FeatureBatch):
    """Sentences of N texts, not normalized, and their attention queries."""

    sentence: Tensor  # (N, D)
    queries: Tensor  # (N, 1, D)


class XPoolHead(PairHead):
    """Cosines (N, M) of texts and the videos whose frames are pooled for them (model/clip_transformer.py).

    `basis` is the number of vectors per frame, 2 if a gate blends two.
    """

    def __init__(self, dimension: int, frames: int, options: XPoolOptions, *, basis: int = 1, extra: int = 0) -> None:
        super().__init__(dimension, basis=basis * options.heads * frames, dropout=options.dropout, extra=extra)
        self.attention = TextConditionedAttention(dimension, options.heads, options.dropout)

    @override
    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[Query, VideoFeatures]:
        return Query(text.sentence, self.attention.queries(text.sentence.unsqueeze(1))), video

    def pooled(self, query: Query, video: VideoFeatures, frames: Tensor | PairFrames | None = None) -> Pairwise:
        """Return the pooled video z of every pair, in one slot; `frames` replace the video's own."""
        return self.attention(query.queries, video.frames if frames is None else frames, video.frame_mask, self.form)

    @override
    def score(self, text: Query, video: VideoFeatures, *given: Any) -> Scores:
        pooled = self.pooled(text, video).unit()
        return Scores(pooled.dot(unit(text.sentence).unsqueeze(1)).squeeze((2, 3)).T)


class XPool(RetrievalModule):
    """X-Pool: every text attends to the frames that are most similar to it.

    Args:
        encoder: encoder of texts and videos.
        xpool: options of X-Pool.
    """

    def __init__(self, encoder: Encoder, *, xpool: XPoolOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = xpool or XPoolOptions()
        self.head = XPoolHead(encoder.dimension, self.frames, self.options).within(self.evaluation_config.memory_gib)

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        return self.head(text, video)

    @override
    def compact_text(self, text: TextFeatures) -> TextFeatures:
        return text.without_words()
