"""Conversion of CLIP's tensors from transformers' names (X-Pool, T-MASS and GAID checkpoints) to OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from tvr_lightning.errors import UserError

SINGLE = {
    "logit_scale": "logit_scale",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
}
TRANSPOSED = {"text_projection.weight": "text_projection", "visual_projection.weight": "visual.proj"}
BLOCK = re.compile(r"(text|vision)_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
IN_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
JOINED = tuple(f"self_attn.{part}_proj" for part in "qkv")
BUFFERS = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")


def with_openai_names(checkpoint: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a checkpoint whose `clip.*` tensors have OpenAI's names and layout; others are unchanged.

    Projections become (width, D); a block's query, key and value matrices are joined to one (3 width, width).

    Args:
        checkpoint: Tensors by the authors' names; without transformers' names after `clip.`, nothing changes.
        source: Name of the file, for the error.

    Raises:
        UserError: A `clip.` tensor does not exist in transformers' CLIPModel, or a part of one is missing.
    """
    if not any(name.startswith(("clip.text_model.", "clip.vision_model.")) for name in checkpoint):
        return dict(checkpoint)
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.items():
        short = name.removeprefix("clip.")
        if short == name:
            renamed[name] = tensor
        elif short in SINGLE:
            renamed[f"clip.{SINGLE[short]}"] = tensor
        elif short in TRANSPOSED:
            renamed[f"clip.{TRANSPOSED[short]}"] = tensor.T.contiguous()
        elif short not in BUFFERS:
            _rename_in_block(short, tensor, renamed, parts, source)
    for name, found in parts.items():
        missing = [part for part in JOINED if part not in found]
        if missing:
            raise UserError(f"{source}: {name} is missing {', '.join(missing)}")
        renamed[name] = torch.cat([found[part] for part in JOINED])
    return renamed


def _rename_in_block(
    name: str, tensor: Tensor, renamed: dict[str, Tensor], parts: dict[str, dict[str, Tensor]], source: str
) -> None:
    match = BLOCK.fullmatch(name)
    side, layer, module, kind = match.groups() if match else ("", "", "", "")
    prefix = f"clip.{'visual.' if side == 'vision' else ''}transformer.resblocks.{layer}"
    if module in IN_BLOCK:
        renamed[f"{prefix}.{IN_BLOCK[module]}.{kind}"] = tensor
    elif module in JOINED:
        parts.setdefault(f"{prefix}.attn.in_proj_{kind}", {})[module] = tensor
    else:
        raise UserError(f"{source}: clip.{name} is not a tensor of transformers' CLIPModel")
