"""Temporal encoders of CLIP4Clip, between CLIP's frame vectors and the similarity of a method.

Both add their input to their output, and use the parameter names in `transformerClip` and `lstm_visual` of the
authors' checkpoints.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from tvr_lightning.encoders.base import Encoder, TemporalInitialization
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import ConfigVariant, Count

MASKED_LOGIT = -1e6
"""Added to the attention logit of a padded frame (CLIP4Clip, modules/modeling.py); finite, so that a video without
frames does not give NaN."""


class QuickGELU(nn.Module):
    """Activation of CLIP's blocks, `x * sigmoid(1.702 x)`, for tensors of any shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of `x`, of the same shape."""
        return x * torch.sigmoid(1.702 * x)


class TemporalBlock(nn.Module):
    """Pre-norm transformer block over the frames (M, F, D) of each video (CLIP4Clip, modules/module_cross.py)."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        # The authors' temporal blocks use eps 1e-12; CLIP's own blocks use 1e-5.
        self.ln_1 = nn.LayerNorm(dimension, eps=1e-12)
        self.attn = nn.MultiheadAttention(dimension, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(dimension, eps=1e-12)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(dimension, 4 * dimension), gelu=QuickGELU(), c_proj=nn.Linear(4 * dimension, dimension)
            )
        )

    def forward(self, x: Tensor, key_bias: Tensor) -> Tensor:
        """Return (M, F, D) for `x` (M, F, D) and `key_bias` (M, F), which is added to the logits of each key frame."""
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, key_padding_mask=key_bias, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TemporalTransformer(nn.Module):
    """CLIP4Clip's `seqTransf`: a transformer over the frames (M, F, D) of each video with a residual connection.

    Learned position embeddings are added to the frames, but not to the residual (CLIP4Clip, modules/modeling.py;
    TC-MGC, Eq. 1). Padded frames are queries but not keys, so their outputs are not zero.

    Args:
        dimension: Dimension D of the frame vectors.
        layers: Number of blocks.
        heads: Number of attention heads. None uses CLIP's rule, D // 64.
        frames: Maximum number of frames F with a position embedding.
    """

    def __init__(self, dimension: int, layers: int = 4, heads: int | None = None, frames: int = 77) -> None:
        super().__init__()
        self.frame_position_embeddings = nn.Embedding(frames, dimension)
        self.resblocks = temporal_blocks(dimension, layers, heads)
        nn.init.normal_(self.frame_position_embeddings.weight, std=0.01)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Return the related frames (M, F, D) of frames (M, F, D) with a mask (M, F) of the valid ones.

        Raises:
            UserError: There are more frames than position embeddings.
        """
        length, most = frames.shape[1], self.frame_position_embeddings.num_embeddings
        if length > most:
            raise UserError(
                f"temporal transformer: {length} frames, but position embeddings for {most}. Raise `frames`."
            )
        key_bias = (1.0 - mask.to(frames.dtype)) * MASKED_LOGIT
        x = frames + self.frame_position_embeddings.weight[:length]
        for block in self.resblocks:
            x = block(x, key_bias)
        return x + frames


def temporal_blocks(dimension: int, layers: int, heads: int | None) -> nn.ModuleList:
    """Return the blocks of a transformer over vectors of dimension D, with CLIP's D // 64 heads if `heads` is None."""
    heads = max(dimension // 64, 1) if heads is None else heads
    return nn.ModuleList(TemporalBlock(dimension, heads) for _ in range(layers))


@torch.no_grad()
def initialize(positions: nn.Embedding, blocks: nn.ModuleList, start: TemporalInitialization) -> None:
    """Copy the positions and the first blocks of CLIP's text transformer, as CLIP4Clip does.

    Positions after the encoder's context length keep their values.
    """
    count = min(len(start.positional_embedding), len(positions.weight))
    positions.weight[:count] = start.positional_embedding[:count].to(positions.weight)
    for block, state in zip(blocks, start.blocks, strict=True):
        block.load_state_dict(state)


class TemporalLSTM(nn.Module):
    """CLIP4Clip's `seqLSTM`: an LSTM over the frames (M, F, D) of each video with a residual connection.

    Args:
        dimension: Dimension D of the frame vectors and of the hidden state.
        layers: Number of stacked LSTM layers.
    """

    def __init__(self, dimension: int, layers: int = 1) -> None:
        super().__init__()
        self.lstm_visual = nn.LSTM(dimension, dimension, num_layers=layers, batch_first=True)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Return the related frames (M, F, D). Padded frames are unchanged (CLIP4Clip, modules/modeling.py).

        Raises:
            UserError: A video has a valid frame after a padded one, for the mask (M, F) of the valid frames.
        """
        real = mask.bool()
        if bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise UserError(
                "temporal LSTM: frame_mask must be True for the first frames of a video and False for the rest"
            )
        # A video without frames runs one step, whose output the mask removes, because packing does not allow length 0.
        lengths = real.sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(frames, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.lstm_visual(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=frames.shape[1])
        return frames + output * real.unsqueeze(-1).to(frames.dtype)


def temporal_transformer(encoder: Encoder, layers: int, frames: int) -> TemporalTransformer | None:
    """Return seqTransf for `frames` frames of an encoder, or None for 0 layers.

    As released, it is initialized from the encoder's text transformer, if the encoder has one, and its position
    embeddings cover at least the encoder's context.
    """
    if not layers:
        return None
    start = encoder.temporal_initialization(layers)
    positions, heads = max(frames, encoder.context_length), None if start is None else start.heads
    temporal = TemporalTransformer(encoder.dimension, layers, heads, positions)
    if start is not None:
        initialize(temporal.frame_position_embeddings, temporal.resblocks, start)
    return temporal


class SimilarityHeader(ConfigVariant):
    """Pooling of CLIP's frames for comparison with a sentence (CLIP4Clip)."""


class TemporalHeader(SimilarityHeader, ABC):
    """Temporal encoder that relates the frames of each video before the comparison."""

    @abstractmethod
    def module(self, encoder: Encoder, frames: int) -> nn.Module | None:
        """Return the module that relates `frames` frames (M, F, D) of an encoder, or None."""


class MeanP(TemporalHeader):
    """No temporal encoder: CLIP's own frames."""

    @override
    def module(self, encoder: Encoder, frames: int) -> None:
        return None


class SeqTransf(TemporalHeader):
    """Transformer, initialized from the text transformer of the encoder.

    Attributes:
        blocks: number of blocks (CLIP4Clip, X-CLIP and DRL, released: cross_num_hidden_layers 4).
    """

    blocks: Count = 4

    @override
    def module(self, encoder: Encoder, frames: int) -> TemporalTransformer | None:
        return temporal_transformer(encoder, self.blocks, frames)


class SeqLSTM(TemporalHeader):
    """LSTM over the frames.

    Attributes:
        layers: number of stacked layers (CLIP4Clip, released: 1).
    """

    # Not named `blocks`, because a recipe with a transformer would pass its number to an LSTM overlay.
    layers: Count = 1

    @override
    def module(self, encoder: Encoder, frames: int) -> TemporalLSTM:
        return TemporalLSTM(encoder.dimension, self.layers)
