"""GARE's psi: cross-attention that turns a query of every pair into an increment of every pair."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvr_lightning.pairwise.base import Pairwise

P = TypeVar("P", bound=Pairwise)


class IncrementNetwork(nn.Module):
    """psi(query, C): one layer of cross-attention over the frames or the words of a pair (GARE, Eq. 7; psi_module.py).

    With q = LN1(query) and C' = LN1(C), the same LN1: o = W_O sum_k softmax_k(W_Q q . W_K C'_k / sqrt(D)) W_V C'_k,
    h = LN2(o), increment = W_M LN3(h + dropout(W_1 h)). One head, as released. The released module also holds
    `log_std_proj`, whose output is thrown away, and `linear2` and `mlp`, which nothing calls; they are not built.

    Args:
        dimension: D.
        dropout: probability on the elements of W_1 h in training.

    Raises:
        ValueError: `dropout` is not in [0, 1).
    """

    def __init__(self, dimension: int, dropout: float = 0.3) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"increment.dropout is {dropout}; it must be at least 0 and below 1")
        self.dropout = dropout
        self.layer_norm1 = nn.LayerNorm(dimension)
        self.layer_norm2 = nn.LayerNorm(dimension)
        self.layer_norm3 = nn.LayerNorm(dimension)
        self.q_proj = nn.Linear(dimension, dimension)
        self.k_proj = nn.Linear(dimension, dimension)
        self.v_proj = nn.Linear(dimension, dimension)
        self.out_proj = nn.Linear(dimension, dimension)
        self.linear1 = nn.Linear(dimension, dimension)
        self.mean_proj = nn.Linear(dimension, dimension)
        # The identity that psi_module.py starts from is overwritten by the released model's `init_weights`.
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.linear1, self.mean_proj):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(
        self, query: P, context: Tensor, mask: Tensor | None = None, side: Literal["video", "text"] = "video"
    ) -> P:
        """Return the increment of every pair, in the form of `query` and with one slot.

        Args:
            query: pair vectors with one slot, such as the gap.
            context: (M, F, D) frames of each video, or (N, W, D) words of each text.
            mask: (M, F) or (N, W), True where there is a frame or word; all are attended to where it is not given. An
                item without any spreads its attention evenly.
            side: whose vectors `context` holds.
        """
        norm, dtype = self.layer_norm1, context.dtype
        context = F.layer_norm(context, norm.normalized_shape, norm.weight.to(dtype), norm.bias.to(dtype), norm.eps)
        keys = _linear(self.k_proj, context)
        # W_O goes to the values, and W_Q to the keys, because they are fewer than the pairs: attention adds up to one,
        # so that the bias of W_O may stand inside it.
        values = _linear(self.out_proj, _linear(self.v_proj, context))
        asked, bias = keys @ self.q_proj.weight.to(dtype), keys @ self.q_proj.bias.to(dtype)
        normed = query.layer_norm(norm)
        if side == "video":
            logits = normed.dot_frames(asked) + bias[:, :, None, None]  # (M, F, N, 1)
        else:
            logits = (normed.dot(asked) + bias[None, :, :, None]).transpose(1, 2)  # (M, W, N, 1)
        if mask is not None:
            real = mask.bool()[:, :, None, None] if side == "video" else mask.bool().T[None, :, :, None]
            logits = logits.masked_fill(~real, torch.finfo(logits.dtype).min)
        weights = (logits / math.sqrt(context.shape[-1])).softmax(1)
        hidden = type(query).mix(weights, values, side).layer_norm(self.layer_norm2)
        branch = hidden.linear(self.linear1).dropout(self.dropout if self.training else 0.0)
        return (hidden + branch).layer_norm(self.layer_norm3).linear(self.mean_proj)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))
