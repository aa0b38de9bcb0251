"""Text-conditioned attention over the frames of a video, for all pairs at once, in both forms of pair vectors."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from tvr_lightning.errors import UserError
from tvr_lightning.pairwise.base import Pairwise
from tvr_lightning.pairwise.blended_frames import PairFrames, PlainFrames
from tvr_lightning.pairwise.dense import DensePairVectors


class TextConditionedAttention(nn.Module):
    """Text-conditioned aggregation of frames: X-Pool's block and TC-MGC's language-video attention.

    With C = LN1(frames) and q = LN1(text): o = sum_f softmax_f(q K_f / sqrt(D / heads)) V_f, h = LN2(W_O o),
    z = LN3(h + dropout(FC(h))) (X-Pool, modules/transformer.py; TC-MGC, Eqs. 2-11). K and V are projections of C, or C
    itself as in TC-MGC's released code, where W_Q, W_K, W_V and W_O are commented out.

    https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/module_xpool.py#L36-L74

    Args:
        dimension: dimension D.
        heads: number of attention heads, each with D / heads columns.
        dropout: dropout probability on the elements of FC(h) in training.
        projections: use of W_Q, W_K, W_V and W_O.
        residual: addition of h to FC(h) (TC-MGC, Table 11).
        initialization: initialization of all linear layers, with zero biases: `identity` as in X-Pool, or `normal` with
            standard deviation 0.02 as in TC-MGC's released code.

    Raises:
        UserError: `dimension` is not a multiple of `heads`.
    """

    def __init__(
        self,
        dimension: int,
        heads: int = 1,
        dropout: float = 0.0,
        projections: bool = True,
        residual: bool = True,
        initialization: Literal["identity", "normal"] = "identity",
    ) -> None:
        super().__init__()
        if heads < 1 or dimension % heads:
            raise UserError(f"attention: heads is {heads}; it must divide the dimension {dimension}")
        self.heads = heads
        self.dropout = dropout
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
        """Return the queries W_Q LN1(text) for text vectors (N, Q, D), in the same shape (Eqs. 2, 8)."""
        return PlainFrames(text).layer_norm(self.layer_norm1).linear(*self._layers("q_proj")).frames

    def forward(
        self,
        queries: Tensor,
        frames: Tensor | PairFrames,
        frame_mask: Tensor | None = None,
        form: type[Pairwise] = DensePairVectors,
    ) -> Pairwise:
        """Return z of every pair and query slot.

        Args:
            queries: Queries of the texts, (N, Q, D), or (M, N, Q, D) if they differ between videos.
            frames: Frame vectors (M, F, D), or frames of every pair.
            frame_mask: Mask (M, F), True for frames. Without it, padded frames are also attended to, as in TC-MGC's
                released code. A video without frames has uniform attention.
            form: Form of the result, if possible.
        """
        context = self._context(frames)
        weights = self._weights(queries, context, frame_mask)
        if self.heads == 1:  # W_O can be applied to the values, because the weights add up to 1
            return self._read(context.linear(*self._layers("v_proj", "out_proj")).mix(weights, form))
        mixed = context.linear(*self._layers("v_proj")).per_head(self.heads).mix(weights, form)
        for layer in self._layers("out_proj"):
            mixed = mixed.linear(layer)
        return self._read(mixed)

    def frame_weights(self, queries: Tensor, frames: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """Return the attention weights of every pair on the frames, (M, heads F, N, Q); arguments as in `forward`."""
        return self._weights(queries, self._context(frames), frame_mask)

    def _read(self, mixed: Pairwise) -> Pairwise:
        """Return z = LN3(h + dropout(FC(h))) with h = LN2(o), from the mixed values o after W_O."""
        hidden = mixed.layer_norm(self.layer_norm2)
        branch = hidden.linear(self.linear_proj).dropout(self.dropout if self.training else 0.0)
        return (hidden + branch if self.residual else branch).layer_norm(self.layer_norm3)

    def _context(self, frames: Tensor | PairFrames) -> PairFrames:
        return (PlainFrames(frames) if isinstance(frames, Tensor) else frames).layer_norm(self.layer_norm1)

    def _weights(self, queries: Tensor, context: PairFrames, frame_mask: Tensor | None) -> Tensor:
        """Return the attention weights (M, heads F, N, Q) over the frames; the weights of each head add up to 1."""
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
        """Return the layers with these names, or an empty list without projections."""
        layers = [self.cross_attn[name] for name in names if name in self.cross_attn]
        assert all(isinstance(layer, nn.Linear) for layer in layers)  # a ModuleDict has no element type
        return layers  # type: ignore[return-value]
