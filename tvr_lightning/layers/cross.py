"""CLIP4Clip's cross encoder: a transformer that reads one text and one video together and says how well they match."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.layers.temporal import MASKED_LOGIT, QuickGELU, TemporalBlock

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
