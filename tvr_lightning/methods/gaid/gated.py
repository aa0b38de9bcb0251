"""Text-conditioned attention over frames that are blends of two vectors, by a gate that the pair decides."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.pairwise.attention import TextConditionedAttention
from tvr_lightning.pairwise.base import Pairwise

P = TypeVar("P", bound=Pairwise)


class GatedAttention(TextConditionedAttention):
    """X-Pool's block over fused frames f = v + g d, d = a - v (GAID: f = g a + (1 - g) v).

    Where the gate belongs to the video, the fused frames are simply the frames of `forward`. Where it is one number per
    pair and frame, `blended` keeps two basis vectors per frame: LN1 of a blend is a blend of the centred v and d, times
    one number per pair and frame. Where it has an element per dimension, `each_pair` takes the fused frames of every
    pair. Arguments as of `TextConditionedAttention`, with all four projections. v, a and d are (M, F, D).
    """

    def __init__(self, dimension: int, heads: int = 1, dropout: float = 0.0) -> None:
        super().__init__(dimension, heads, dropout)

    def blended(
        self, queries: P, frames: Tensor, difference: Tensor, gate: Tensor, frame_mask: Tensor | None = None
    ) -> P:
        """Return z of every pair with its own fused frames v + g d.

        Args:
            queries: pair vectors with one slot to ask with.
            frames: (M, F, D), v.
            difference: (M, F, D), d.
            gate: (M, F, N), g, the same for all dimensions of a frame.
            frame_mask: (M, F), True where there is a frame.
        """
        norm = self.layer_norm1
        centred = [x - x.mean(-1, keepdim=True) for x in (frames, difference)]
        deviation = blended_square(centred[0], centred[1], gate) / frames.shape[-1]
        scale = (deviation + norm.eps).rsqrt()  # (M, F, N): LN1 of the blend is this times the centred blend
        parts = [x * norm.weight for x in centred]
        keys, values = (
            [self._per_head(F.linear(x, self._layer(name).weight)) for x in parts] for name in ("k_proj", "v_proj")
        )
        scale = scale.repeat(1, self.heads, 1).unsqueeze(-1)  # (M, heads F, N, 1)
        gate = gate.repeat(1, self.heads, 1).unsqueeze(-1)
        count, frame_count = frames.shape[:2]
        common = self._per_head(self._projected("k_proj", norm.bias).expand(count, 1, -1))
        products = scale * (queries.dot_frames(keys[0]) + gate * queries.dot_frames(keys[1]))
        products = products + queries.dot_frames(common).repeat_interleave(frame_count, dim=1)
        weights = self.weights(products, frame_mask) * scale
        form = type(queries)
        mixed = form.mix(torch.cat([weights, gate * weights], dim=1), torch.cat(values, dim=1))
        common = self._projected("v_proj", norm.bias).expand(count, 1, -1)  # attention adds up to 1
        return self.finish(mixed + form.from_videos(common, gate.shape[2]))


def blended_square(frames: Tensor, difference: Tensor, gate: Tensor) -> Tensor:
    """Squared length of v + g d for every pair: |v|^2 + 2 g v.d + g^2 |d|^2.

    Args:
        frames: (M, F, D), v.
        difference: (M, F, D), d.
        gate: (M, F, N), g.

    Returns:
        (M, F, N), at least 0.
    """
    own = frames.square().sum(-1, keepdim=True)
    mixed = (frames * difference).sum(-1, keepdim=True)
    other = difference.square().sum(-1, keepdim=True)
    return (own + gate * (2 * mixed + gate * other)).clamp(min=0)
