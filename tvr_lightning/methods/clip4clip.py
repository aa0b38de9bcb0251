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
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.layers.temporal import MASKED_LOGIT, QuickGELU, TemporalBlock, TemporalLSTM, temporal_transformer
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.contrast import ContrastiveLearning
from tvr_lightning.training.distributed import Gather
from tvr_lightning.training.optim import OptimizerConfig

SimilarityHeader = Literal["meanP", "seqLSTM", "seqTransf", "tightTransf"]


def mean_pooling_similarity(text: TextFeatures, video: VideoFeatures) -> Tensor:
    """Cosine of each sentence with the mean of each video's normalised frames (CLIP4Clip, Eq. 2, "loose" heads).

    Returns:
        (N, M) cosines.
    """
    pooled = normalize(masked_mean(normalize(video.frames, dim=-1), video.frame_mask), dim=-1)
    return normalize(text.sentence, dim=-1) @ pooled.T


PAIRS_PER_BLOCK = 2048
"""Pairs scored at once; each holds F + 1 tokens in every layer."""


class CrossEncoder(nn.Module):
    """CLIP4Clip's `tightTransf`: self-attention over [sentence, frames], pooled at the sentence, to one logit.

    Every pair runs through all layers by itself, so there is no factorised form: pairs are scored in blocks, and while
    gradients are wanted the blocks are recomputed in the backward pass, so that memory stays that of one block
    (CLIP4Clip, modules/module_cross.py, and `_cross_similarity` in modules/modeling.py). The layers' names are the
    authors' below `cross.` without the names of the submodules that only group them.

    Args:
        dimension: D, width of sentence and frame vectors.
        layers: number of blocks.
        heads: attention heads; None is CLIP's rule, D // 64.
        positions: largest number of tokens F + 1 that has a position embedding.
        dropout: on the tokens with their positions, in training (released: 0.1, cross_config.json; the blocks have
            none).
        pairs_per_block: pairs that are scored at once.

    Raises:
        ValueError: `dimension` is no multiple of `heads`, a number is below 1, or dropout is outside [0, 1).
    """

    def __init__(
        self,
        dimension: int,
        layers: int = 4,
        heads: int | None = None,
        positions: int = 77,
        dropout: float = 0.1,
        pairs_per_block: int = PAIRS_PER_BLOCK,
    ) -> None:
        super().__init__()
        heads = max(dimension // 64, 1) if heads is None else heads
        if min(dimension, layers, heads, positions, pairs_per_block) < 1:
            raise ValueError(
                f"cross encoder: dimension ({dimension}), layers ({layers}), heads ({heads}), positions ({positions}) "
                f"and pairs_per_block ({pairs_per_block}) must be at least 1"
            )
        if dimension % heads:
            raise ValueError(f"cross encoder: dimension {dimension} is no multiple of heads {heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"cross encoder: dropout is {dropout}; expected a number in [0, 1)")
        self.pairs_per_block = pairs_per_block
        self.position_embeddings = nn.Embedding(positions, dimension)
        self.dropout = nn.Dropout(dropout)
        self.resblocks = nn.ModuleList(TemporalBlock(dimension, heads) for _ in range(layers))
        self.ln_pool = nn.LayerNorm(dimension, eps=1e-12)
        self.dense = nn.Linear(dimension, dimension)
        self.activation = QuickGELU()
        self.similarity_dense = nn.Linear(dimension, 1)
        # BERT's rule, which the released `init_weights` applies to every linear layer and embedding.
        for weight in (self.position_embeddings.weight, self.dense.weight, self.similarity_dense.weight):
            nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(self.dense.bias)
        nn.init.zeros_(self.similarity_dense.bias)

    def forward(self, sentence: Tensor, frames: Tensor, frame_mask: Tensor) -> Tensor:
        """Score every text against every video.

        Args:
            sentence: (N, D) sentence vectors, not normalised.
            frames: (M, F, D) frame vectors, not normalised.
            frame_mask: (M, F), True or 1 where there is a frame.

        Returns:
            (N, M) logits; they carry no temperature.

        Raises:
            ValueError: more tokens than position embeddings.
        """
        tokens, most = frames.shape[1] + 1, self.position_embeddings.num_embeddings
        if tokens > most:
            raise ValueError(
                f"cross encoder: a sentence and {tokens - 1} frames need {tokens} position embeddings, there are "
                f"{most}; raise `frames` at construction"
            )
        text_step = max(1, self.pairs_per_block // max(len(frames), 1))
        video_step = max(1, min(self.pairs_per_block, len(frames)))
        blocks = -(-len(sentence) // text_step) * -(-len(frames) // video_step)
        recompute = torch.is_grad_enabled() and blocks > 1
        rows = []
        for texts in sentence.split(text_step):
            row = []
            for some, mask in zip(frames.split(video_step), frame_mask.split(video_step), strict=True):
                if recompute:
                    row.append(checkpoint(self._block, texts, some, mask, use_reentrant=False))
                else:
                    row.append(self._block(texts, some, mask))
            rows.append(torch.cat(row, dim=1))
        return torch.cat(rows)

    def _block(self, sentence: Tensor, frames: Tensor, frame_mask: Tensor) -> Tensor:
        """Logits (N, M) of a block of pairs, all at once."""
        texts, (videos, length, dimension) = len(sentence), frames.shape
        pairs = torch.cat(
            [
                sentence[:, None, None].expand(texts, videos, 1, dimension),
                frames.expand(texts, videos, length, dimension),
            ],
            dim=2,
        ).flatten(0, 1)
        real = torch.nn.functional.pad(frame_mask.to(frames.dtype), (1, 0), value=1.0)
        key_bias = ((1.0 - real) * MASKED_LOGIT).repeat(texts, 1)
        x = self.dropout(pairs + self.position_embeddings.weight[: length + 1])
        for block in self.resblocks:
            x = block(x, key_bias)
        pooled = self.activation(self.dense(self.ln_pool(x[:, 0])))
        return self.similarity_dense(pooled).view(texts, videos)

    @torch.no_grad()
    def initialize(self, position: Tensor, blocks: list[Mapping[str, Tensor]]) -> None:
        """Start from the positional embedding and first blocks of CLIP's text transformer, as CLIP4Clip does.

        Args:
            position: (L, D); positions past L keep their values.
            blocks: state of each block under the names of an OpenAI CLIP text transformer; further blocks here keep
                their values.

        Raises:
            ValueError: the text transformer has another width than D.
        """
        own = self.position_embeddings.weight
        if position.shape[-1] != own.shape[-1]:
            raise ValueError(
                f"cross encoder: the text transformer's width {position.shape[-1]} is not the features' {own.shape[-1]}"
            )
        count = min(len(position), len(own))
        own[:count] = position[:count].to(own)
        for block, state in zip(self.resblocks, blocks, strict=False):
            block.load_state_dict(state)


def cross_encoder(encoder: Encoder, layers: int, frames: int, dropout: float) -> CrossEncoder:
    """Build tightTransf for an encoder, started from its text transformer where the encoder offers that (CLIP4Clip).

    Args:
        encoder: gives the width D and the weights to start from.
        layers: number of blocks.
        frames: largest number of frames F; position embeddings cover at least the encoder's context, as released.
        dropout: on the tokens, in training.
    """
    start = encoder.temporal_initialization(layers)
    positions = max(frames + 1, encoder.context_length)
    heads = None if start is None else start.heads
    cross = CrossEncoder(encoder.dimension, layers=layers, heads=heads, positions=positions, dropout=dropout)
    if start is not None:
        cross.initialize(start.positional_embedding, list(start.blocks))
    return cross


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
