"""Temporal encoders of CLIP4Clip, between CLIP's frame vectors and the similarity of a method.

Both add their input to their output, and use the parameter names in `transformerClip` and `lstm_visual` of the
authors' checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tvr_lightning.encoders.base import Encoder
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

    Raises:
        UserError: `dimension` is not a multiple of `heads`, or a number is below 1.
    """

    def __init__(self, dimension: int, layers: int = 4, heads: int | None = None, frames: int = 77) -> None:
        super().__init__()
        heads = max(dimension // 64, 1) if heads is None else heads
        if min(dimension, layers, heads, frames) < 1:
            raise UserError(
                f"temporal transformer: dimension ({dimension}), layers ({layers}), heads ({heads}) and "
                f"frames ({frames}) must be at least 1"
            )
        if dimension % heads:
            raise UserError(f"temporal transformer: dimension {dimension} must be a multiple of heads {heads}")
        self.frame_position_embeddings = nn.Embedding(frames, dimension)
        self.resblocks = nn.ModuleList(TemporalBlock(dimension, heads) for _ in range(layers))
        nn.init.normal_(self.frame_position_embeddings.weight, std=0.01)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Return the frames (M, F, D) of each video related over time.

        Args:
            frames: Frame vectors (M, F, D).
            mask: Mask (M, F), True or 1 for valid frames.

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

    @torch.no_grad()
    def initialize(self, state: Mapping[str, Tensor]) -> None:
        """Copy the first blocks and the positional embedding of CLIP's text transformer, as CLIP4Clip does.

        Args:
            state: `positional_embedding` (L, D) and `resblocks.{n}.*` of at least as many blocks as here, with the
                names of an OpenAI CLIP text transformer. Positions after L keep their values.

        Raises:
            UserError: A tensor is missing or has another shape, or the text transformer's width is not D.
        """
        position = self.frame_position_embeddings.weight
        source = state.get("positional_embedding")
        if source is None or source.shape[-1] != position.shape[-1]:
            found = "nothing" if source is None else f"shape {tuple(source.shape)}"
            raise UserError(
                f"temporal initialization: positional_embedding needs width {position.shape[-1]}, got {found}"
            )
        count = min(len(source), len(position))
        position[:count] = source[:count].to(position)
        for name, parameter in self.resblocks.named_parameters(prefix="resblocks"):
            source = state.get(name)
            if source is None or source.shape != parameter.shape:
                found = "nothing" if source is None else f"shape {tuple(source.shape)}"
                raise UserError(f"temporal initialization: {name} needs shape {tuple(parameter.shape)}, got {found}")
            parameter.copy_(source)


class TemporalLSTM(nn.Module):
    """CLIP4Clip's `seqLSTM`: an LSTM over the frames (M, F, D) of each video with a residual connection.

    Args:
        dimension: Dimension D of the frame vectors and of the hidden state.
        layers: Number of stacked LSTM layers.

    Raises:
        UserError: A number is below 1.
    """

    def __init__(self, dimension: int, layers: int = 1) -> None:
        super().__init__()
        if min(dimension, layers) < 1:
            raise UserError(f"temporal LSTM: dimension ({dimension}) and layers ({layers}) must be at least 1")
        self.lstm_visual = nn.LSTM(dimension, dimension, num_layers=layers, batch_first=True)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Return the related frames (M, F, D). Padded frames are unchanged (CLIP4Clip, modules/modeling.py).

        Args:
            frames: Frame vectors (M, F, D), valid frames first.
            mask: Mask (M, F), True or 1 for valid frames.

        Raises:
            UserError: A video has a valid frame after a padded one.
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


def temporal_transformer(encoder: Encoder, layers: int, frames: int) -> TemporalTransformer:
    """Return seqTransf for an encoder, initialized from its text transformer if the encoder has one (CLIP4Clip).

    Args:
        encoder: Encoder with dimension D and the initial weights.
        layers: Number of blocks.
        frames: Maximum number of frames F. Position embeddings cover at least the encoder's context, as released.
    """
    start = encoder.temporal_initialization(layers)
    positions = max(frames, encoder.context_length)
    heads = None if start is None else start.heads
    temporal = TemporalTransformer(encoder.dimension, layers=layers, heads=heads, frames=positions)
    if start is not None:
        blocks = {
            f"resblocks.{number}.{name}": value
            for number, block in enumerate(start.blocks)
            for name, value in block.items()
        }
        temporal.initialize({"positional_embedding": start.positional_embedding, **blocks})
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

    def module(self, encoder: Encoder, frames: int) -> None:
        """Return None."""


class SeqTransf(TemporalHeader):
    """Transformer, initialized from the text transformer of the encoder.

    Args:
        blocks: number of blocks (CLIP4Clip, X-CLIP and DRL, released: cross_num_hidden_layers 4).
    """

    def __init__(self, blocks: Count = 4) -> None:
        self.blocks = blocks

    def module(self, encoder: Encoder, frames: int) -> TemporalTransformer:
        """Return the transformer for `frames` frames (M, F, D) of an encoder."""
        return temporal_transformer(encoder, self.blocks, frames)


class SeqLSTM(TemporalHeader):
    """LSTM over the frames.

    Args:
        layers: number of stacked layers (CLIP4Clip, released: 1).
    """

    # Not named `blocks`, because a recipe with a transformer would pass its number to an LSTM overlay.
    def __init__(self, layers: Count = 1) -> None:
        self.layers = layers

    def module(self, encoder: Encoder, frames: int) -> TemporalLSTM:
        """Return the LSTM for frames (M, F, D) of an encoder."""
        return TemporalLSTM(encoder.dimension, self.layers)
