"""CLIP4Clip: An Empirical Study of CLIP for End to End Video Clip Retrieval (Luo et al., Neurocomputing 2022).

The similarity heads of the paper on CLIP's sentence and frame vectors. Follows the released code (ArrowLuo/CLIP4Clip,
modules/modeling.py). GARE, TC-MGC, and NCL build on CLIP4Clip.

Deviations:
- ties: released counts a tied query several times; here ranks ties by their expected rank.
- gradient of the gather: released keeps each device's own slice, so that the encoders get 1 / W of the gradient on W
  devices; here as released, on any number of devices (`gather: own-slice`, `released_devices`).
- negatives of tightTransf: released gathers nothing for it; here as released only with `gather: none`.
- precision: released trains CLIP's matrices as float16 parameters with float16 moments, so that a rate of 1e-7 moves
  CLIP about 40 times as far as in float32 (benchmarks/results/precision.md); here as released
  (`encoder_precision: float16`), and `recipes/variants/float32.yaml` for bf16 and FSDP.
- selection: released selects the best test R@1 of the epochs; here uses the weights of the last step;
  `recipes/variants/select-on-test.yaml` selects as released.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import (
    MASKED_LOGIT,
    MeanP,
    QuickGELU,
    SimilarityHeader,
    TemporalHeader,
    initialize,
    temporal_blocks,
)
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.option_types import Count, Options, variant


class TightTransf(SimilarityHeader):
    """Cross encoder for each pair of sentence and frames. It runs a transformer for every pair.

    Attributes:
        blocks: number of blocks (released: cross_num_hidden_layers 4).
    """

    blocks: Count = 4


@dataclass
class CLIP4ClipOptions(Options):
    """Options of CLIP4Clip.

    Attributes:
        similarity_header: pooling of the frames: `MeanP` (the default) pools CLIP's frames; `SeqTransf` and `SeqLSTM`
            first relate them over time; `TightTransf` processes each pair (modules/modeling.py, `sim_header`).
    """

    similarity_header: SimilarityHeader = variant(MeanP)


def pooled_frames(video: VideoFeatures) -> Tensor:
    """Return the unit mean (M, D) of the unit frames of each video (CLIP4Clip, Eq. 2)."""
    return normalize(masked_mean(normalize(video.frames, dim=-1), video.frame_mask), dim=-1)


def mean_pooling_similarity(text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Return cosines (N, M) of sentences and pooled frames (CLIP4Clip, "loose" heads)."""
    return normalize(text.sentence, dim=-1) @ pooled_frames(video).T


class CrossEncoder(PairHead):
    """CLIP4Clip's `tightTransf`: self-attention over [sentence, frames], pooled at the sentence, to one logit.

    The score of a pair cannot be factorized (CLIP4Clip, modules/module_cross.py, and `_cross_similarity` in
    modules/modeling.py). Layer names are those in the released `cross.` module, without its grouping submodules.
    Dropout acts on the tokens with their positions (released: 0.1, cross_config.json); the blocks have none.
    """

    def __init__(
        self, dimension: int, layers: int = 4, heads: int | None = None, positions: int = 77, dropout: float = 0.1
    ) -> None:
        super().__init__(dimension, side="both")
        self.position_embeddings = nn.Embedding(positions, dimension)
        self.dropout = nn.Dropout(dropout)
        self.resblocks = temporal_blocks(dimension, layers, heads)
        self.ln_pool = nn.LayerNorm(dimension, eps=1e-12)
        self.dense = nn.Linear(dimension, dimension)
        self.activation = QuickGELU()
        self.similarity_dense = nn.Linear(dimension, 1)
        # BERT's initialization, which the released `init_weights` applies to every linear layer and embedding.
        for weight in (self.position_embeddings.weight, self.dense.weight, self.similarity_dense.weight):
            nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(self.dense.bias)
        nn.init.zeros_(self.similarity_dense.bias)

    @override
    def pair_numbers(self, text: TextFeatures, video: VideoFeatures) -> int:
        # The tokens of a pair, and both layers of an MLP, which are four times as wide.
        numbers = 12 * self.dimension * (1 + video.frames.shape[1])
        return numbers * len(self.resblocks) if torch.is_grad_enabled() else numbers

    @override
    def score(self, text: TextFeatures, video: VideoFeatures, *given: Any) -> Scores:
        texts = len(text)
        videos, length, dimension = video.frames.shape
        if length >= self.position_embeddings.num_embeddings:
            raise UserError(
                f"cross encoder: a sentence and {length} frames need {length + 1} position embeddings, but there are "
                f"{self.position_embeddings.num_embeddings}. Raise `frames`."
            )
        sentences = text.sentence[:, None, None].expand(texts, videos, 1, dimension)
        pairs = torch.cat([sentences, video.frames.expand(texts, videos, length, dimension)], dim=2).flatten(0, 1)
        real = pad(video.frame_mask.to(pairs.dtype), (1, 0), value=1.0)
        key_bias = ((1.0 - real) * MASKED_LOGIT).repeat(texts, 1)
        x = self.dropout(pairs + self.position_embeddings.weight[: length + 1])
        for block in self.resblocks:
            x = block(x, key_bias)
        pooled = self.activation(self.dense(self.ln_pool(x[:, 0])))
        return Scores(self.similarity_dense(pooled).view(texts, videos))


def cross_encoder(encoder: Encoder, layers: int, frames: int) -> CrossEncoder:
    """Return tightTransf for up to `frames` frames of an encoder.

    As released, it is initialized from the encoder's text transformer, if the encoder has one, and its position
    embeddings cover at least the encoder's context.
    """
    start = encoder.temporal_initialization(layers)
    positions = max(frames + 1, encoder.context_length)
    heads = None if start is None else start.heads
    cross = CrossEncoder(encoder.dimension, layers, heads, positions)
    if start is not None:
        initialize(cross.position_embeddings, cross.resblocks, start)
    return cross


class CLIP4Clip(RetrievalModule):
    """CLIP4Clip. With `TightTransf`, the score is the cross encoder's logit, trained without a temperature as released.

    Args:
        encoder: encoder of texts and videos.
        clip4clip: options of CLIP4Clip.
    """

    def __init__(self, encoder: Encoder, *, clip4clip: CLIP4ClipOptions | None = None, **shared: Any) -> None:
        super().__init__(encoder, **shared)
        self.options = clip4clip or CLIP4ClipOptions()
        header = self.options.similarity_header
        self.needs_frames = not isinstance(header, MeanP)
        if isinstance(header, TemporalHeader):
            self.temporal = header.module(encoder, self.frames)
        self.cross: CrossEncoder | None = None
        if isinstance(header, TightTransf):
            cross = cross_encoder(encoder, header.blocks, self.frames)
            self.cross = cross.within(self.evaluation_config.memory_gib)
            # No loss depends on it, and distributed training requires a gradient for every trained parameter.
            self.temperature.requires_grad_(False)

    @override
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        if self.cross is not None:
            return self.cross(text, video)
        return Scores(mean_pooling_similarity(text, video))

    @override
    def logits(self, similarity: Tensor) -> Tensor:
        return similarity if self.cross is not None else super().logits(similarity)

    @override
    def compact_text(self, text: TextFeatures) -> TextFeatures:
        return text.without_words()

    @override
    def compact_video(self, video: VideoFeatures) -> VideoFeatures:
        if self.cross is not None:
            return video
        pooled = pooled_frames(video).unsqueeze(1)
        return VideoFeatures(pooled, torch.ones_like(pooled[..., 0], dtype=torch.bool))

    @override
    def score_temperature(self) -> float:
        return 1.0 if self.cross is not None else super().score_temperature()
