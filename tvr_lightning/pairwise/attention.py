"""Text-conditioned attention over the frames of a video, for all pairs at once, in either form of pair vectors."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvr_lightning.pairwise.base import Pairwise
from tvr_lightning.pairwise.dense import DensePairVectors

P = TypeVar("P", bound=Pairwise)


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
        projections: whether W_Q, W_K, W_V and W_O are applied.
        residual: whether h is added to FC(h) (TC-MGC, Table 11).
        initialization: of all linear layers, biases zero: the `identity` as in X-Pool, or `normal` with deviation 0.02
            as in TC-MGC's released code.

    Raises:
        ValueError: `dimension` is no multiple of `heads`, or `dropout` is not in [0, 1).

    Example:
        >>> attention = TextConditionedAttention(64, heads=2)
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
    ) -> None:
        super().__init__()
        if heads < 1 or dimension % heads:
            raise ValueError(f"attention: heads is {heads}; it must divide the dimension {dimension}")
        if not 0 <= dropout < 1:
            raise ValueError(f"attention: dropout is {dropout}; it must be at least 0 and below 1")
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
        """Return what the texts ask with, W_Q LN1(text), for text vectors (N, Q, D) of the same shape (Eqs. 2, 8)."""
        return self._projected("q_proj", self._normed(text))

    def forward(self, queries: P, frames: Tensor, frame_mask: Tensor | None = None) -> P:
        """Return z of every pair and query slot, in the form of `queries`.

        Args:
            queries: pair vectors to ask with, such as `from_texts(self.queries(text), videos=M)`.
            frames: (M, F, D) frame vectors.
            frame_mask: (M, F), True where there is a frame; padded frames are attended to where it is not given, as in
                TC-MGC's released code. A video without frames spreads its attention evenly.
        """
        values = self._per_head(self._projected("v_proj", self._normed(frames)))
        return self.finish(type(queries).mix(self.frame_weights(queries, frames, frame_mask), values))

    def frame_weights(self, queries: Pairwise, frames: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """Return how much every pair attends to each frame, (M, heads F, N, Q); arguments as in `forward`."""
        keys = self._per_head(self._projected("k_proj", self._normed(frames)))
        return self.weights(queries.dot_frames(keys), frame_mask)

    def each_pair(self, queries: Tensor, frames: Tensor, frame_mask: Tensor | None = None) -> DensePairVectors:
        """Return z of pairs whose frames share nothing with those of other pairs.

        Args:
            queries: (N, D) of all videos alike, or (M, N, D).
            frames: (M, N, F, D) frames of every pair.
            frame_mask: (M, F), as in `forward`.
        """
        context = self._normed(frames)
        keys = self._projected("k_proj", context).unflatten(-1, (self.heads, -1))
        values = self._projected("v_proj", context).unflatten(-1, (self.heads, -1))
        asked = queries.expand(*frames.shape[:2], -1).unflatten(-1, (self.heads, -1))
        products = torch.einsum("mnhd,mnfhd->mhfn", asked, keys).flatten(1, 2).unsqueeze(-1)
        weights = self.weights(products, frame_mask).squeeze(-1).unflatten(1, (self.heads, -1))
        mixed = torch.einsum("mhfn,mnfhd->mnhd", weights, values).flatten(2)
        return self.finish(DensePairVectors(mixed.unsqueeze(2)))

    def weights(self, products: Tensor, frame_mask: Tensor | None = None) -> Tensor:
        """Return the attention of every head over the frames.

        Args:
            products: (M, heads F, N, Q), the queries' inner products with the keys of each head.
            frame_mask: as in `forward`.

        Returns:
            (M, heads F, N, Q); each head's add up to 1 over its F frames.
        """
        width = self.layer_norm1.normalized_shape[0]
        logits = products * math.sqrt(self.heads / width)
        logits = logits.unflatten(1, (self.heads, -1))  # (M, heads, F, N, Q)
        if frame_mask is not None:
            padded = ~frame_mask.bool()[:, None, :, None, None]
            logits = logits.masked_fill(padded, torch.finfo(logits.dtype).min)
        return logits.softmax(2).flatten(1, 2)

    def finish(self, mixed: P) -> P:
        """Return z = LN3(h + dropout(FC(h))), h = LN2(W_O o), of the mixed values o."""
        if "out_proj" in self.cross_attn:
            mixed = mixed.linear(self._layer("out_proj"))
        hidden = mixed.layer_norm(self.layer_norm2)
        branch = hidden.linear(self.linear_proj).dropout(self.dropout if self.training else 0.0)
        return (hidden + branch if self.residual else branch).layer_norm(self.layer_norm3)

    def _normed(self, x: Tensor) -> Tensor:
        norm = self.layer_norm1
        return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)

    def _projected(self, name: str, x: Tensor) -> Tensor:
        if name not in self.cross_attn:
            return x
        layer = self._layer(name)
        return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))

    def _per_head(self, x: Tensor) -> Tensor:
        """Return (M, heads F, D): the vectors (M, F, D) once per head, with zeros outside the head's columns."""
        if self.heads == 1:
            return x
        width = x.shape[-1] // self.heads
        own = torch.eye(self.heads, dtype=x.dtype, device=x.device).repeat_interleave(width, dim=1)  # (heads, D)
        return (x.unsqueeze(1) * own[None, :, None]).flatten(1, 2)

    def _layer(self, name: str) -> nn.Linear:
        layer = self.cross_attn[name]
        assert isinstance(layer, nn.Linear)  # a ModuleDict does not tell
        return layer
