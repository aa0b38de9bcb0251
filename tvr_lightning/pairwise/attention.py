"""Text-conditioned attention over the frames of a video, for all pairs at once, in either form of pair vectors."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tvr_lightning.pairwise.base import DropoutPer, Pairwise
from tvr_lightning.pairwise.blends import PairFrames, PlainFrames


class TextConditionedAttention(nn.Module):
    """Aggregates the frames of every video as every text asks: X-Pool's block, TC-MGC's language-video attention.

    With C = LN1(frames) and q = LN1(text): o = sum_f softmax_f(q K_f / sqrt(D / heads)) V_f, h = LN2(W_O o),
    z = LN3(h + dropout(FC(h))) (X-Pool, modules/transformer.py; TC-MGC, Eqs. 2-11). K and V are projections of C, or C
    itself as in TC-MGC's released code, where W_Q, W_K, W_V and W_O are commented out.
    https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/module_xpool.py#L36-L74

    Args:
        dimension: D.
        heads: attention heads, each over D / heads columns.
        dropout: probability on the elements of FC(h) in training.
        dropout_per: what it is drawn for anew, every pair or every video.
        projections: whether W_Q, W_K, W_V and W_O are applied.
        residual: whether h is added to FC(h) (TC-MGC, Table 11).
        initialization: of all linear layers, biases zero: the `identity` as in X-Pool, or `normal` with deviation 0.02
            as in TC-MGC's released code.

    Raises:
        ValueError: `dimension` is no multiple of `heads`, or `dropout` is not in [0, 1).

    Example:
        >>> attention = TextConditionedAttention(64, heads=2)
        >>> from tvr_lightning.pairwise import DensePairVectors
        >>> text, frames = torch.randn(3, 1, 64), torch.randn(5, 12, 64)
        >>> asked = DensePairVectors.from_texts(attention.queries(text), videos=5)
        >>> attention(asked, frames).materialize().shape  # (N, M, Q, D)
        torch.Size([3, 5, 1, 64])
    """

    def __init__(
        self,
        dimension: int,
        heads: int = 1,
        dropout: float = 0.0,
        projections: bool = True,
        residual: bool = True,
        initialization: Literal["identity", "normal"] = "identity",
        dropout_per: DropoutPer = "pair",
    ) -> None:
        super().__init__()
        if heads < 1 or dimension % heads:
            raise ValueError(f"attention: heads is {heads}; it must divide the dimension {dimension}")
        if not 0 <= dropout < 1:
            raise ValueError(f"attention: dropout is {dropout}; it must be at least 0 and below 1")
        self.heads = heads
        self.dropout = dropout
        self.dropout_per: DropoutPer = dropout_per
        self.residual = residual
        self.layer_norm1 = nn.LayerNorm(dimension)
        self.layer_norm2 = nn.LayerNorm(dimension)
        self.layer_norm3 = nn.LayerNorm(dimension)
        self.linear_proj = nn.Linear(dimension, dimension)
        names = ("q_proj", "k_proj", "v_proj", "out_proj") if projections else ()
        projected = {name: nn.Linear(dimension, dimension) for name in names}
        self.cross_attn = nn.ModuleDict(projected)
        for layer in (self.linear_proj, *projected.values()):
            nn.init.eye_(layer.weight) if initialization == "identity" else nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def queries(self, text: Tensor) -> Tensor:
        """Return what the texts ask with, W_Q LN1(text), for text vectors (N, Q, D) of the same shape (Eqs. 2, 8)."""
        return PlainFrames(text).layer_norm(self.layer_norm1).linear(*self._layers("q_proj")).frames

    def forward(self, queries: Pairwise, frames: Tensor | PairFrames, frame_mask: Tensor | None = None) -> Pairwise:
        """Return z of every pair and query slot, in the form of `queries`.

        Args:
            queries: pair vectors to ask with, such as `from_texts(self.queries(text), videos=M)`.
            frames: (M, F, D) frame vectors, or frames of every pair.
            frame_mask: (M, F), True where there is a frame; padded frames are attended to where it is not given, as in
                TC-MGC's released code. A video without frames spreads its attention evenly.
        """
        context = self._context(frames)
        weights = self._weights(queries, context, frame_mask)
        if self.heads == 1:  # W_O may go to the values, because the weights add up to 1
            return self._read(context.linear(*self._layers("v_proj", "out_proj")).mix(weights, type(queries)))
        mixed = context.linear(*self._layers("v_proj")).per_head(self.heads).mix(weights, type(queries))
        for layer in self._layers("out_proj"):
            mixed = mixed.linear(layer)
        return self._read(mixed)

    def frame_weights(self, queries: Pairwise, frames: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """Return how much every pair attends to each frame, (M, heads F, N, Q); arguments as in `forward`."""
        return self._weights(queries, self._context(frames), frame_mask)

    def _read(self, mixed: Pairwise) -> Pairwise:
        """Return z = LN3(h + dropout(FC(h))), h = LN2(o), of the mixed values o behind W_O."""
        hidden = mixed.layer_norm(self.layer_norm2)
        branch = hidden.linear(self.linear_proj).dropout(self.dropout if self.training else 0.0, self.dropout_per)
        return (hidden + branch if self.residual else branch).layer_norm(self.layer_norm3)

    def _context(self, frames: Tensor | PairFrames) -> PairFrames:
        return (PlainFrames(frames) if isinstance(frames, Tensor) else frames).layer_norm(self.layer_norm1)

    def _weights(self, queries: Pairwise, context: PairFrames, frame_mask: Tensor | None) -> Tensor:
        """Return the attention (M, heads F, N, Q) of every head over the frames; each head's adds up to 1."""
        if self.heads == 1:
            products = context.dot(queries, *self._layers("k_proj"))
        else:
            products = context.linear(*self._layers("k_proj")).per_head(self.heads).dot(queries)
        logits = products * math.sqrt(self.heads / self.layer_norm1.normalized_shape[0])
        logits = logits.unflatten(1, (self.heads, -1))  # (M, heads, F, N, Q)
        if frame_mask is not None:
            padded = ~frame_mask.bool()[:, None, :, None, None]
            logits = logits.masked_fill(padded, torch.finfo(logits.dtype).min)
        return logits.softmax(2).flatten(1, 2)

    def _layers(self, *names: str) -> list[nn.Linear]:
        """Return the layers of these names; none where nothing is projected."""
        layers = [self.cross_attn[name] for name in names if name in self.cross_attn]
        assert all(isinstance(layer, nn.Linear) for layer in layers)  # a ModuleDict does not tell
        return layers  # type: ignore[return-value]
