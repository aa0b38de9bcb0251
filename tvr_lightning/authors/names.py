"""Names of tensors in released code, and loading of tensors under our names."""

import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from tvr_lightning.encoders.weights import fitted
from tvr_lightning.errors import UserError
from tvr_lightning.methods.gaid.method import AUDIO

Module = TypeVar("Module", bound=nn.Module)
Names = Mapping[str, str | None]
"""Rules from prefixes of the authors' names to ours, or None for tensors that the released code never uses."""

CLIP: Names = {
    "clip.logit_scale": "temperature.logit_scale",
    "clip.": "encoder.clip.",
}
TEMPORAL: Names = {
    "transformerClip.resblocks.": "temporal.resblocks.",
    "frame_position_embeddings.": "temporal.frame_position_embeddings.",
    "lstm_visual.": "temporal.lstm_visual.",
    "cross.embeddings.position_embeddings.": "cross.position_embeddings.",
    "cross.transformer.resblocks.": "cross.resblocks.",
    "cross.pooler.ln_pool.": "cross.ln_pool.",
    "cross.pooler.dense.": "cross.dense.",
    "similarity_dense.": "cross.similarity_dense.",
}
"""CLIP4Clip's temporal encoders, which most released codes share (ArrowLuo/CLIP4Clip, modules/modeling.py)."""

DRL: Names = {
    "text_weight_fc.": "head.word_weights.",
    "video_weight_fc.": "head.frame_weights.",
}
XPOOL: Names = {"pool_frames.": "head.attention."}
TMASS: Names = {
    **XPOOL,
    "stochastic.std_branch.linear_proj.": "head.radius.linear_proj.",
    "stochastic.std_branch.learnable_scalar": None,
}
GAID: Names = {
    **TMASS,
    # https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/model/clip_stochastic.py#L78-L82
    "gate_fc.": "head.gate.linear.",
    "stochastic.alpha": "head.alpha",
    "linear.": "audio_projection.",
}
GARE: Names = {
    "psi.layers.0.cross_attn.": "head.psi.",
    "psi.layers.0.": "head.psi.",
    "psi.": "head.psi.",
    # The output of log_std_proj is discarded.
    # https://github.com/musicman217/GARE-text-video-retrieval/blob/e42b0e2/tvr/models/modeling.py#L184-L206
    "psi.log_std_proj.": None,
    "psi.layers.0.linear2.": None,
    "psi.layers.0.mlp.": None,
    "weight_fc.": None,
}
TCMGC: Names = {
    "conditional_transformer.pool_frames.": "head.attention.",
    # The lines for W_Q, W_K, W_V and W_O are commented out in the released forward pass.
    # https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/module_xpool.py#L36-L74
    "conditional_transformer.pool_frames.cross_attn.": None,
    "global_mat_weight": "head.global_matrix",
    "local_mat_weight": "head.local_matrix",
    # https://github.com/JingXiaolun/TC-MGC/blob/c1575747c0a6f62b82c033c105d8d87c53066f2a/modules/modeling_tcmgc.py#L426
    "logit_weight": "head.lsa.weight",
    "attentive_word_logit_weight": "head.video_word_aggregation.weight",
    "concat_frame_word_logit_weight": "head.sentence_frame_aggregation.weight",
    "attentive_word_mat_weight": "head.frame_word_aggregation.words.weight",
    "attentive_word_mat_weight2": "head.frame_word_aggregation.words_after_frames.weight",
    "attentive_frame_word_mat_weight": "head.frame_word_aggregation.frames.weight",
    "attentive_frame_word_mat_weight2": "head.frame_word_aggregation.frames_after_words.weight",
}
PREDICTOR = "visual_token_selector.score_predictor."
UCOFIA: Names = {
    "global_mat_weight": "head.sentence_matrix",
    "global_mat_weight_1": "head.video_matrix",
    "local_mat_weight": "head.word_matrix",
    "local_mat_weight1": "head.patch_matrix",
    "frame_logit_weight": "head.sentence_frame.weight",
    "pixel_mat_weight": "head.word_patch.frames.weight",
    "pixel_mat_weight2": "head.word_patch.frames_after_words.weight",
    "word_mat_weight": "head.word_patch.words.weight",
    "word_mat_weight2": "head.word_patch.words_after_frames.weight",
    f"{PREDICTOR}in_conv.0.": "selector.scores.norm.",
    f"{PREDICTOR}in_conv.1.": "selector.scores.inner.",
    f"{PREDICTOR}out_conv.0.": "selector.scores.joint.",
    f"{PREDICTOR}out_conv.2.": "selector.scores.out.",
    "word_logit_weight": None,
    "frame_mat_weight": None,
    "word_mat_weight_for_pixel": None,
}
XCLIP: Names = {
    "global_mat_weight": "head.global_matrix",
    "local_mat_weight": "head.local_matrix",
    "word_logit_weight": "head.video_word.weight",
    "frame_logit_weight": "head.sentence_frame.weight",
    "word_mat_weight": "head.frame_word.words.weight",
    "word_mat_weight2": "head.frame_word.words_after_frames.weight",
    "frame_mat_weight": "head.frame_word.frames.weight",
    "frame_mat_weight2": "head.frame_word.frames_after_words.weight",
}

SHIFTED = {
    f"clip.visual.transformer.resblocks.{block}.attn.net.": f"clip.visual.transformer.resblocks.{block}.attn."
    for block in (10, 11)
}
"""Rules for the attentions that UCoFiA's `make_patch_shift` wraps (modules/until_module.py)."""
TRANSFORMERS: Names = {
    "clip.text_model.embeddings.position_ids": None,
    "clip.text_model.embeddings.token_embedding.": "clip.token_embedding.",
    "clip.text_model.embeddings.position_embedding.weight": "clip.positional_embedding",
    "clip.text_model.encoder.layers.": "clip.transformer.resblocks.",
    "clip.text_model.final_layer_norm.": "clip.ln_final.",
    "clip.text_projection.weight": "clip.text_projection",
    "clip.vision_model.embeddings.position_ids": None,
    "clip.vision_model.embeddings.class_embedding": "clip.visual.class_embedding",
    "clip.vision_model.embeddings.patch_embedding.": "clip.visual.conv1.",
    "clip.vision_model.embeddings.position_embedding.weight": "clip.visual.positional_embedding",
    "clip.vision_model.pre_layrnorm.": "clip.visual.ln_pre.",
    "clip.vision_model.encoder.layers.": "clip.visual.transformer.resblocks.",
    "clip.vision_model.post_layernorm.": "clip.visual.ln_post.",
    "clip.visual_projection.weight": "clip.visual.proj",
}
"""Rules from CLIP's names in transformers (X-Pool, T-MASS and GAID) to OpenAI's."""
IN_BLOCK = {
    ".layer_norm1.": ".ln_1.",
    ".layer_norm2.": ".ln_2.",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
    ".self_attn.out_proj.": ".attn.out_proj.",
}
JOINED = re.compile(r"\.self_attn\.([qkv])_proj\.")
TRANSPOSED = ("clip.text_projection.weight", "clip.visual_projection.weight")


def replace_prefix(name: str, rules: Names) -> str | None:
    """Replace the longest prefix of a name that has a rule. None if the rule is None; other names are unchanged."""
    prefix = max((prefix for prefix in rules if name.startswith(prefix)), key=len, default="")
    new = rules.get(prefix, "")
    return None if new is None else new + name[len(prefix) :]


def openai_name(name: str) -> str | None:
    """Return OpenAI's name for a tensor of transformers' CLIP; query, key and value have the same one."""
    renamed = replace_prefix(name, TRANSFORMERS)
    if renamed is None or renamed == name:
        return renamed
    for theirs, ours in IN_BLOCK.items():
        renamed = renamed.replace(theirs, ours)
    return JOINED.sub(".attn.in_proj_", renamed)


def with_openai_names(checkpoint: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Return a checkpoint whose `clip.*` tensors have OpenAI's names and layout; others are unchanged.

    Projections become (width, D); a block's query, key and value matrices are joined to one (3 width, width).

    Raises:
        UserError: The query, key or value of a block is missing.
    """
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.items():
        ours = openai_name(name)
        if ours is None:
            continue
        if ours != name and (joined := JOINED.search(name)):
            parts.setdefault(ours, {})[joined[1]] = tensor
        else:
            renamed[ours] = tensor.T.contiguous() if name in TRANSPOSED else tensor
    for name, found in parts.items():
        missing = [f"self_attn.{part}_proj" for part in "qkv" if part not in found]
        if missing:
            raise UserError(f"{source}: {name} is missing {', '.join(missing)}")
        renamed[name] = torch.cat([found[part] for part in "qkv"])
    return renamed


def load(module: Module, checkpoint: Mapping[str, Tensor], names: Names, source: str) -> Module:
    """Load a checkpoint into a method or a part of it, without its audio encoder, and return it in evaluation mode.

    Raises:
        UserError: Names are unexpected or missing, or shapes differ; the message lists all by the authors' names.
    """
    theirs = {ours: name for name in checkpoint if (ours := replace_prefix(name, names)) is not None}
    prefixes = {ours: prefix for prefix, ours in names.items() if ours is not None}
    expected = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith(AUDIO)}
    state = fitted(
        {ours: checkpoint[name] for ours, name in theirs.items()},
        expected,
        source,
        lambda ours: theirs.get(ours) or str(replace_prefix(ours, prefixes)),
    )
    module.load_state_dict(state, strict=False)
    return module.eval()
