"""Parts of CLIP's transformer blocks that save about half of the activations for the backward pass."""

from typing import Any

import torch
from open_clip.transformer import LayerNormFp32, QuickGELU, ResidualAttentionBlock
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override


def save_activations(model: nn.Module) -> None:
    """Make the blocks of open_clip's transformers recompute cheap operations; parameters and results stay the same."""
    for block in model.modules():
        if type(block) is ResidualAttentionBlock:
            if type(block.attn) is nn.MultiheadAttention:
                block.attn.__class__ = LeanAttention
            if type(block.mlp) is nn.Sequential and type(block.mlp.gelu) is QuickGELU:
                block.mlp.__class__ = LeanMLP
            for norm in (block.ln_1, block.ln_2):
                if type(norm) is LayerNormFp32:
                    norm.__class__ = LeanLayerNorm


def _saves(*parts: nn.Module) -> bool:
    """Return whether there is a backward pass to save memory for, and no part was replaced, such as by an adapter."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and {*map(type, parts)} <= {nn.Linear}


class LeanAttention(nn.MultiheadAttention):
    """Self-attention (B, L, D) whose queries, keys and values are views of one tensor instead of copies."""

    @override
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any) -> Any:
        mask, usual = options.get("attn_mask"), {"need_weights": False, "attn_mask": options.get("attn_mask")}
        if given or options != usual or key is not query or value is not query or not _saves():
            return super().forward(query, key, value, *given, **options)
        projected = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        batch, tokens = (0, 1) if self.batch_first else (1, 0)
        heads = projected.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, batch, 3, tokens, 4)
        if mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (-1, self.num_heads))
        queries, keys, values = heads.unbind()
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)  # (B, heads, L, D / heads)
        return self.out_proj(mixed.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)).flatten(2)), None


class LeanMLP(nn.Sequential):
    """c_proj(quick_gelu(c_fc(x))) that recomputes the activation."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        first, _, last = self
        if not isinstance(last, nn.Linear) or not _saves(last):
            return super().forward(x)  # type: ignore[no-untyped-call]
        hidden = first(x)
        mapped: Tensor = _ActivatedLinear.apply(hidden, last.weight.to(hidden.dtype), last.bias.to(hidden.dtype))
        return mapped


class LeanLayerNorm(LayerNormFp32):
    """LayerNorm in float32 of half-precision vectors (B, L, D) that does not save their float32 copy."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not _saves() or x.dtype == torch.float32:
            return super().forward(x)
        normalized: Tensor = _HalfLayerNorm.apply(x, self.weight, self.bias, self.eps)
        return normalized


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden * torch.sigmoid(1.702 * hidden), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * hidden)
        rows = gradient.flatten(0, -2)
        of_weight = rows.T @ (hidden * gate).flatten(0, -2)
        of_activation = gradient @ weight
        # Rounded in the order of autograd
        of_gate = torch.ops.aten.sigmoid_backward(of_activation * hidden, gate) * 1.702
        return of_activation * gate + of_gate, of_weight, rows.sum(0)


class _HalfLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        normalized, mean, scale = torch.native_layer_norm(x.float(), [x.shape[-1]], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return normalized.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        of_x, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            gradient.float(), x.float(), [x.shape[-1]], mean, scale, weight, bias, [True, True, True]
        )
        return of_x.to(x.dtype), of_weight, of_bias, None
