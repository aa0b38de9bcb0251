"""X-Pool: Cross-Modal Language-Video Attention for Text-Video Retrieval (Gorti et al., CVPR 2022).

Follows the released code (layer6ai-labs/xpool, model/clip_transformer.py, modules/transformer.py, modules/metrics.py);
T-MASS and GAID build on it.

Deviations:
- padded frames: released has none, since short clips repeat their last frame; here they are left out.
- captions: released pads to the longest of a batch; here to `words`.
- several captions per video: released scores them in a table padded with minus infinity; here texts and videos are
  scored once each and paired by index.
- selection: released on the test set, ten times per epoch; here by `results.select_on`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.pairwise import (
    DensePairVectors,
    PairVectors,
    Pairwise,
    TextConditionedAttention,
    score_in_blocks,
)
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.optim import OptimizerConfig

Pooling = Literal["mean", "top-k", "attention", "transformer"]
PairwiseForm = Literal["auto", "factorised", "dense"]


@dataclass
class CrossAttentionConfig:
    """X-Pool's cross-attention of a text and the frames of a video (modules/transformer.py).

    Attributes:
        heads: attention heads.
        dropout: on FC in training. Above 0, training builds every vector of every pair.
    """

    heads: int = 1
    dropout: float = 0.3


@dataclass
class XPoolConfig:
    """Switches of the head under the names of the arguments of `XPool`, which says what they mean.

    Raises:
        ValueError: options of which one makes another senseless.
    """

    pooling: Pooling = "transformer"
    attention: CrossAttentionConfig = field(default_factory=CrossAttentionConfig)
    top_k: int | None = None
    attention_temperature: float | None = None
    form: PairwiseForm = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if (self.pooling == "top-k") != (self.top_k is not None):
            raise ValueError(f"top_k is {self.top_k} with pooling: {self.pooling}; top_k belongs to pooling: top-k")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")
        if self.attention_temperature is not None:
            if self.pooling != "attention":
                raise ValueError(f"attention_temperature belongs to pooling: attention, not to {self.pooling}")
            if self.attention_temperature <= 0:
                raise ValueError(f"attention_temperature is {self.attention_temperature}; it must be above 0")
        if self.pooling != "transformer" and self.attention != CrossAttentionConfig():
            raise ValueError(
                f"pooling: {self.pooling} builds no cross-attention: leave attention at its defaults, or use "
                "pooling: transformer"
            )
        dropout = self.attention.dropout if self.pooling == "transformer" else 0.0
        check_form(self.form, dropout, self.memory_budget)


def check_form(form: PairwiseForm, dropout: float, memory_budget: int | None) -> None:
    """Refuse a form of pair vectors that the dropout excludes, and an empty memory budget.

    Raises:
        ValueError: names both options and the fix.
    """
    if form == "factorised" and dropout:
        raise ValueError(
            f"form: factorised never builds the elements that attention.dropout {dropout} would zero: set "
            "attention.dropout to 0, or form to auto"
        )
    if memory_budget is not None and memory_budget < 1:
        raise ValueError(f"memory_budget is {memory_budget} MiB; it must be at least 1")


def chosen_form(form: PairwiseForm, dropout: float, vectors: int, dimension: int) -> type[Pairwise]:
    """Return the form of pair vectors: the one asked for, or the cheaper that the dropout at hand allows.

    Args:
        form: as in the recipe.
        dropout: probability on the pair vectors' elements, 0 outside training.
        vectors: K, size of the basis per video.
        dimension: D.
    """
    if form == "auto":
        return DensePairVectors if dropout or vectors >= dimension else PairVectors
    return PairVectors if form == "factorised" else DensePairVectors


def block_budget(memory_budget: int | None, device: torch.device) -> int:
    """Return the bytes that one block of pairs may take: the recipe's, else 64 MiB on a CPU and 1024 elsewhere."""
    return 2**20 * (memory_budget or (64 if device.type == "cpu" else 1024))


@dataclass
class Query(Record):
    """What the head needs of N texts.

    Attributes:
        sentence: (N, D), not normalised.
        queries: (N, 1, D) what the texts attend with.
    """

    sentence: Tensor
    queries: Tensor


class XPoolHead(nn.Module):
    """Frames (M, F, D) pooled as every text asks, and the cosines (N, M) of both (model/clip_transformer.py).

    Args:
        dimension: D.
        config: switches.
    """

    def __init__(self, dimension: int, config: XPoolConfig | None = None) -> None:
        super().__init__()
        self.dimension = dimension
        self.config = config = config or XPoolConfig()
        self.attention: TextConditionedAttention | None = None
        if config.pooling == "transformer":
            self.attention = TextConditionedAttention(dimension, config.attention.heads, config.attention.dropout)

    def form(self, frames: int) -> type[Pairwise]:
        """Return the form of pair vectors for F frames, in the present mode (training or not)."""
        if self.attention is None:
            return chosen_form(self.config.form, 0.0, frames, self.dimension)
        dropout = self.attention.dropout if self.training else 0.0
        return chosen_form(self.config.form, dropout, self.attention.heads * frames, self.dimension)

    def prepared(self, text: TextFeatures) -> Query:
        """Return what the texts ask with."""
        sentence = text.sentence.unsqueeze(1)
        return Query(text.sentence, unit(sentence) if self.attention is None else self.attention.queries(sentence))

    def pool(self, query: Query, frames: Tensor, frame_mask: Tensor) -> Pairwise:
        """Return z, the video of every pair in one slot.

        Args:
            query: of N texts.
            frames: (M, F, D).
            frame_mask: (M, F), True where there is a frame.
        """
        form = self.form(frames.shape[1])
        asked = form.from_texts(query.queries, videos=len(frames))
        if self.attention is not None:
            return self.attention(asked, frames, frame_mask)
        frames = unit(frames)  # model/clip_baseline.py normalises before it pools
        similarity = asked.dot_frames(frames)  # (M, F, N, 1)
        padded = ~frame_mask.bool()[:, :, None, None]
        if self.config.pooling == "mean":
            weights = (~padded).to(frames.dtype).expand_as(similarity)
            return form.mix(weights / weights.sum(1, keepdim=True).clamp(min=1), frames)
        similarity = similarity.masked_fill(padded, torch.finfo(similarity.dtype).min)
        if self.config.pooling == "attention":
            return form.mix((similarity / (self.config.attention_temperature or 0.01)).softmax(1), frames)
        assert self.config.top_k is not None
        kept = similarity.topk(min(self.config.top_k, frames.shape[1]), dim=1).indices
        weights = torch.zeros_like(similarity).scatter(1, kept, 1.0).masked_fill(padded, 0.0)
        return form.mix(weights, frames)

    def forward(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score N texts against M videos, block by block.

        Returns:
            `similarity` (N, M), cosines.
        """
        text, video = text.float(), video.float()
        with torch.autocast(text.sentence.device.type, enabled=False):
            return score_in_blocks(
                self._score_block,
                self.prepared(text),
                video,
                self._pair_bytes(video.frames.shape[1], text.sentence.element_size()),
                block_budget(self.config.memory_budget, text.sentence.device),
            )

    def _score_block(self, query: Query, video: VideoFeatures) -> Scores:
        pooled = self.pool(query, video.frames, video.frame_mask).unit()
        return Scores(pooled.dot(unit(query.sentence).unsqueeze(1))[:, :, 0, 0].T)

    def _pair_bytes(self, frames: int, element: int) -> int:
        heads = 1 if self.attention is None else self.attention.heads
        vector = self.dimension if self.form(frames) is DensePairVectors else heads * frames + 2
        return 6 * element * vector


class XPool(RetrievalModule):
    """X-Pool: every text attends to the frames that it resembles.

    Args:
        encoder: media to features.
        optimizer: optimiser, learning rates, schedule.
        evaluation: how scores become a table.
        words: text positions W, SOT and EOT included.
        frames: frames F per video.
        gather: which negatives and which gradient several devices give.
        contrast: what else the contrastive loss does with logits.
        pooling: `transformer` is X-Pool's cross-attention; `mean`, the `top-k` frames nearest to the text, and
            `attention`, a softmax over the text's cosines with the frames, are the paper's baselines
            (modules/baseline_pooling.py).
        attention: X-Pool's cross-attention.
        top_k: frames that pooling `top-k` keeps.
        attention_temperature: that the cosines of pooling `attention` are divided by (released default: 0.01).
        form: `factorised` never builds a vector per pair, `dense` does, `auto` takes the cheaper that options allow.
        memory_budget: memory for one block of pairs in MiB; by default 64 on a CPU, 1024 elsewhere.

    Raises:
        ValueError: switches that do not fit each other.
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
        pooling: Pooling = "transformer",
        attention: CrossAttentionConfig | None = None,
        top_k: int | None = None,
        attention_temperature: float | None = None,
        form: PairwiseForm = "auto",
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(encoder, optimizer, evaluation, words, frames, gather, contrast)
        config = XPoolConfig(
            pooling=pooling,
            attention=attention or CrossAttentionConfig(),
            top_k=top_k,
            attention_temperature=attention_temperature,
            form=form,
            memory_budget=memory_budget,
        )
        self.head = XPoolHead(encoder.dimension, config)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score any N texts against any M videos.

        Returns:
            `similarity` (N, M), cosines of sentences and the videos pooled for them.
        """
        return self.head(text, video)

    def compact_text(self, text: TextFeatures) -> TextFeatures:
        """Drop the words of N texts: the sentence alone is read."""
        return text.without_words()
