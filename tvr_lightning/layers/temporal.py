"""Temporal encoders: what CLIP4Clip puts between the frame vectors of CLIP and a method's similarity.

Both add the vectors they were given to their output, and both keep the parameter names below `transformerClip` and
`lstm_visual` of the authors' checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tvr_lightning.encoders.base import Encoder
from tvr_lightning.ranges import Count, Kind

MASKED_LOGIT = -1e6
"""Added to the attention logit of a padded frame (CLIP4Clip, modules/modeling.py); finite, so that a video without
frames gives numbers and not NaN."""


class QuickGELU(nn.Module):
    """The activation of CLIP's blocks, `x * sigmoid(1.702 x)`, on a tensor of any shape."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of `x`, of the same shape."""
        return x * torch.sigmoid(1.702 * x)


class TemporalBlock(nn.Module):
    """Pre-norm transformer block over the frames (M, F, D) of each video (CLIP4Clip, modules/module_cross.py)."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        # eps 1e-12 is that of the authors' temporal blocks; CLIP's own blocks have 1e-5.
        self.ln_1 = nn.LayerNorm(dimension, eps=1e-12)
        self.attn = nn.MultiheadAttention(dimension, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(dimension, eps=1e-12)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(dimension, 4 * dimension), gelu=QuickGELU(), c_proj=nn.Linear(4 * dimension, dimension)
            )
        )

    def forward(self, x: Tensor, key_bias: Tensor) -> Tensor:
        """Return (M, F, D) for `x` (M, F, D) and `key_bias` (M, F), added to the attention logits of each key frame."""
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, key_padding_mask=key_bias, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TemporalTransformer(nn.Module):
    """CLIP4Clip's `seqTransf`: a transformer over the frames (M, F, D) of each video, added to the frames it was given.

    The frames get learnt position embeddings, the residual does not (CLIP4Clip, modules/modeling.py; TC-MGC, Eq. 1).
    Padded frames are no keys, but they are queries, so their outputs are not zero.

    Args:
        dimension: D, width of the frame vectors.
        layers: number of blocks.
        heads: attention heads; None is CLIP's rule, D // 64.
        frames: largest number of frames F that has a position embedding.

    Raises:
        ValueError: `dimension` is no multiple of `heads`, or a number is below 1.
    """

    def __init__(self, dimension: int, layers: int = 4, heads: int | None = None, frames: int = 77) -> None:
        super().__init__()
        heads = max(dimension // 64, 1) if heads is None else heads
        if min(dimension, layers, heads, frames) < 1:
            raise ValueError(
                f"temporal transformer: dimension ({dimension}), layers ({layers}), heads ({heads}) and "
                f"frames ({frames}) must be at least 1"
            )
        if dimension % heads:
            raise ValueError(f"temporal transformer: dimension {dimension} must be a multiple of heads {heads}")
        self.frame_position_embeddings = nn.Embedding(frames, dimension)
        self.resblocks = nn.ModuleList(TemporalBlock(dimension, heads) for _ in range(layers))
        nn.init.normal_(self.frame_position_embeddings.weight, std=0.01)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Relate the frames of each video to one another.

        Args:
            frames: (M, F, D) frame vectors.
            mask: (M, F), True or 1 where there is a frame.

        Returns:
            (M, F, D).

        Raises:
            ValueError: more frames than position embeddings.
        """
        length, most = frames.shape[1], self.frame_position_embeddings.num_embeddings
        if length > most:
            raise ValueError(
                f"temporal transformer: {length} frames, but position embeddings for {most}. Raise `frames`."
            )
        key_bias = (1.0 - mask.to(frames.dtype)) * MASKED_LOGIT
        x = frames + self.frame_position_embeddings.weight[:length]
        for block in self.resblocks:
            x = block(x, key_bias)
        return x + frames

    @torch.no_grad()
    def initialize(self, state: Mapping[str, Tensor]) -> None:
        """Start from the first blocks and the positional embedding of CLIP's text transformer, as CLIP4Clip does.

        Args:
            state: `positional_embedding` (L, D) and `resblocks.{n}.*` of at least as many blocks as are here, under
                the names of an OpenAI CLIP text transformer. Positions past L keep their values.

        Raises:
            ValueError: a tensor is missing or has another shape; the text transformer's width must equal D.
        """
        position = self.frame_position_embeddings.weight
        source = state.get("positional_embedding")
        if source is None or source.shape[-1] != position.shape[-1]:
            found = "nothing" if source is None else f"shape {tuple(source.shape)}"
            raise ValueError(
                f"temporal initialization: positional_embedding needs width {position.shape[-1]}, got {found}"
            )
        count = min(len(source), len(position))
        position[:count] = source[:count].to(position)
        for name, parameter in self.resblocks.named_parameters(prefix="resblocks"):
            source = state.get(name)
            if source is None or source.shape != parameter.shape:
                found = "nothing" if source is None else f"shape {tuple(source.shape)}"
                raise ValueError(f"temporal initialization: {name} needs shape {tuple(parameter.shape)}, got {found}")
            parameter.copy_(source)


class TemporalLSTM(nn.Module):
    """CLIP4Clip's `seqLSTM`: an LSTM over the frames (M, F, D) of each video, added to the frames it was given.

    Args:
        dimension: D, width of the frame vectors and of the hidden state.
        layers: stacked LSTM layers.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(self, dimension: int, layers: int = 1) -> None:
        super().__init__()
        if min(dimension, layers) < 1:
            raise ValueError(f"temporal LSTM: dimension ({dimension}) and layers ({layers}) must be at least 1")
        self.lstm_visual = nn.LSTM(dimension, dimension, num_layers=layers, batch_first=True)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Run over the frames that are there; padded frames come back as they were (CLIP4Clip, modules/modeling.py).

        Args:
            frames: (M, F, D) frame vectors, real frames first.
            mask: (M, F), True or 1 where there is a frame.

        Returns:
            (M, F, D).

        Raises:
            ValueError: a video has a frame behind a padded one.
        """
        real = mask.bool()
        if bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise ValueError(
                "temporal LSTM: frame_mask must be True for the first frames of a video and False for the rest"
            )
        # A video without frames runs one step, whose output the mask removes: packing refuses length 0.
        lengths = real.sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(frames, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.lstm_visual(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=frames.shape[1])
        return frames + output * real.unsqueeze(-1).to(frames.dtype)


def temporal_transformer(encoder: Encoder, layers: int, frames: int) -> TemporalTransformer:
    """Build seqTransf for an encoder, started from its text transformer where the encoder offers that (CLIP4Clip).

    Args:
        encoder: gives the width D and the weights to start from.
        layers: number of blocks.
        frames: largest number of frames F; position embeddings cover at least the encoder's context, as released.
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


class SimilarityHeader(Kind):
    """How CLIP's frames become what a sentence is compared with (CLIP4Clip)."""


class TemporalHeader(SimilarityHeader, ABC):
    """What relates the frames of each video to one another before they are compared."""

    @abstractmethod
    def module(self, encoder: Encoder, frames: int) -> nn.Module | None:
        """Return what relates `frames` frames (M, F, D) of an encoder; None where nothing does."""


class MeanP(TemporalHeader):
    """Nothing: CLIP's own frames."""

    def module(self, encoder: Encoder, frames: int) -> None:
        """See `TemporalHeader.module`."""


class SeqTransf(TemporalHeader):
    """A transformer, started from the text transformer of the encoder.

    Args:
        blocks: number of blocks (CLIP4Clip, X-CLIP and DRL, released: cross_num_hidden_layers 4).
    """

    def __init__(self, blocks: Count = 4) -> None:
        self.blocks = blocks

    def module(self, encoder: Encoder, frames: int) -> TemporalTransformer:
        """See `TemporalHeader.module`."""
        return temporal_transformer(encoder, self.blocks, frames)


class SeqLSTM(TemporalHeader):
    """An LSTM.

    Args:
        layers: number of stacked layers (CLIP4Clip, released: 1).
    """

    # No `blocks`, which a recipe with a transformer would hand on to the LSTM that is laid over it.
    def __init__(self, layers: Count = 1) -> None:
        self.layers = layers

    def module(self, encoder: Encoder, frames: int) -> TemporalLSTM:
        """See `TemporalHeader.module`."""
        return TemporalLSTM(encoder.dimension, self.layers)
