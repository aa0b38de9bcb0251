"""X-Pool: Cross-Modal Language-Video Attention for Text-Video Retrieval (Gorti et al., CVPR 2022).

Follows the released code (layer6ai-labs/xpool, model/clip_transformer.py, modules/transformer.py, modules/metrics.py).
T-MASS and GAID build on X-Pool.

Deviations:
- padded frames: released has none, since short clips repeat their last frame; here padded frames are masked.
- captions: released pads to the longest caption of a batch; here pads to `words`.
- several captions per video: released scores them in a table padded with minus infinity; here scores each text and
  each video once and pairs them by index.
- draws of dropout: released draws for every pair; here too, or for every video, whose pairs then lose the same elements
  (`xpool.dropout_per: video`).
- pixels: released uses float32, resized without antialiasing; here the same (`data.init_args.antialias: false`), stored
  in float16, so that a value from 0 to 255 is off by at most 1/8.
- selection: released selects on the test set, ten times per epoch; here selects by `results.select_on`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead, check_dropout_per
from tvr_lightning.option_types import Count, Dropout, Options
from tvr_lightning.pairwise import DropoutPer, PairFrames, Pairwise, TextConditionedAttention


@dataclass
class XPoolOptions(Options):
    """X-Pool's cross-attention between a text and the frames of a video (modules/transformer.py).

    Attributes:
        heads: number of attention heads.
        dropout: dropout rate of the elements of FC(h) in training.
        dropout_per: unit with its own dropout samples: every `pair` (released), which computes the vectors of all
            pairs, or every `video`, whose pairs lose the same elements, which is cheaper.

    Raises:
        UserError: Dropout samples per video with a dropout rate of 0.
    """

    heads: Count = 1
    dropout: Dropout = 0.3
    dropout_per: DropoutPer = "pair"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dropout_per(self.dropout_per, self.dropout)


@dataclass
class Query(FeatureBatch):
    """Prepared features of N texts.

    Attributes:
        sentence: Sentences (N, D), not normalized.
        queries: Attention queries (N, 1, D).
    """

    sentence: Tensor
    queries: Tensor


class PoolingHead(PairHead):
    """Text-conditioned pooling of frames (M, F, D) (model/clip_transformer.py), shared with T-MASS and GAID.

    Args:
        dimension: Dimension D of the features.
        frames: Number of frames F.
        options: Options of the attention.
        basis: Number of vectors per frame; 2 if a gate blends two.
        extra: Additional memory per pair, see `PairHead`.
    """

    def __init__(self, dimension: int, frames: int, options: XPoolOptions, *, basis: int = 1, extra: int = 0) -> None:
        vectors = basis * options.heads * frames
        super().__init__(
            dimension, basis=vectors, dropout=options.dropout, dropout_per=options.dropout_per, extra=extra
        )
        self.attention = TextConditionedAttention(
            dimension, options.heads, options.dropout, dropout_per=options.dropout_per
        )

    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[Query, VideoFeatures]:
        """Return the queries of the texts, and the videos unchanged."""
        return Query(text.sentence, self.attention.queries(text.sentence.unsqueeze(1))), video

    def pooled(self, query: Query, video: VideoFeatures, frames: Tensor | PairFrames | None = None) -> Pairwise:
        """Return the pooled video z of every pair, in one slot; `frames` replace the video's own."""
        queries = self.of_texts(query.queries, len(video))
        return self.attention(queries, video.frames if frames is None else frames, video.frame_mask)


class XPoolHead(PoolingHead):
    """Cosines (N, M) of texts and the videos pooled for them.

    Args:
        dimension: Dimension D of the features.
        frames: Number of frames F.
        options: Options of the attention.
    """

    def __init__(self, dimension: int, frames: int, options: XPoolOptions | None = None) -> None:
        super().__init__(dimension, frames, options or XPoolOptions())

    def score(self, query: Query, video: VideoFeatures) -> Scores:
        """Return the cosines of n texts and m videos."""
        pooled = self.pooled(query, video).unit()
        return Scores(pooled.dot(unit(query.sentence).unsqueeze(1))[:, :, 0, 0].T)


class XPool(RetrievalModule):
    """X-Pool: every text attends to the frames that are most similar to it.

    Args:
        encoder: encoder of texts and videos.
        xpool: options of X-Pool.
        shared: arguments of `RetrievalModule`.
    """

    def __init__(self, encoder: Encoder, *, xpool: XPoolOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = options = xpool or XPoolOptions()
        self.head = XPoolHead(encoder.dimension, self.frames, options).within(self.evaluation_config.memory_gib)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Return cosines (N, M) of sentences and the videos pooled for them."""
        return self.head(text, video)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts, because only the sentence is used."""
        return text.without_words()
