"""Cases of TempMe: the merging vision tower with LoRA in both towers and mean pooling, in float64."""

import pytest
import torch
from encoders.parts import openai_encoder
from parity.compute.features import encode_case, first_pairs

from tvr_lightning.encoders import LoRA, token_merging
from tvr_lightning.encoders.token_merging import TempMe
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.methods import CLIP4Clip

ADDED = {
    "TVPt_LoRA_a": "parametrizations.in_proj_weight.0.down",
    "TVPt_LoRA_b": "parametrizations.in_proj_weight.0.up",
    "in_proj_weight": "parametrizations.in_proj_weight.original",
    "TVPt_Video_Positional_embedding": "clip_positions",
}


def ours(name):
    path, dot, leaf = name.rpartition(".")
    return f"{path}{dot}{ADDED.get(leaf, leaf)}"


def options_of(config):
    across, within = config["merge_token_proportion"]
    return TempMe(
        frames=config["max_frames"],
        removed_per_frame=config["tome_r"],
        clip_blocks=tuple(config["merge_layer"]),
        joined=tuple(config["merge_frame_num"]),
        removed_across=across,
        removed_within=within,
        positions=bool(config["frame_pos"]),
        proportional_attention=config["prop_attn"],
    )


@torch.enable_grad()
def compute_tempme(case):
    config, tensors = case.config, {name.removeprefix("clip."): value for name, value in case.checkpoint.items()}
    plain = {name: value for name, value in tensors.items() if "TVPt" not in name}
    encoder = openai_encoder(plain, token_merging=options_of(config), heads=config["heads"])
    rank = config["lora_dim"]
    tuning = LoRA(rank, float(rank), ("query", "key", "value"), shared=True)
    method = CLIP4Clip(encoder, words=config["words"], frames=config["max_frames"], tuning=tuning).double()
    state = {ours(name): value.double() for name, value in tensors.items() if name != "logit_scale"}
    own = encoder.clip.state_dict()
    state = {name: value.reshape(own[name].shape) for name, value in state.items()}
    missing = encoder.clip.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith(".scale") for name in missing.missing_keys)
    method.temperature.logit_scale.data.copy_(tensors["logit_scale"])
    method.requires_grad_(True)

    outputs, choices = [], []
    for block in encoder.clip.visual.transformer.resblocks:
        block.register_forward_hook(lambda block, _, output: outputs.append((block.counts, *output)))
    plain_match = token_merging.match

    def match(*arguments):
        choices.append(plain_match(*arguments))
        return choices[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_merging, "match", match)
        text, video = encode_case(case, encoder)
    pooled = masked_mean(torch.nn.functional.normalize(video.frames, dim=-1), video.frame_mask)
    similarity = method.score(text, video).similarity
    loss = method.losses(first_pairs(text, video))["info_nce"]
    loss.backward()

    found = {"sentence": text.sentence, "frames": video.frames, "video": pooled, "similarity": similarity, "loss": loss}
    rows = {}
    for index, (counts, tokens, sizes) in enumerate(outputs):
        shape = (len(video), config["max_frames"], -1)
        found[f"layer.{index}.class_tokens"] = tokens[:, : counts.class_tokens].reshape(shape)
        found[f"layer.{index}.size"] = sizes
        for kind, count in (("cross", counts.across), ("intra", counts.within)):
            if count:
                sources, targets, _ = choices.pop(0)
                order = sources.argsort(dim=1)
                found[f"layer.{index}.{kind}.source"] = sources.gather(1, order)
                found[f"layer.{index}.{kind}.target"] = targets.gather(1, order)
        rows[index] = [counts.clips, counts.class_tokens, counts.attended, counts.left, counts.across, counts.within]
    found["tokens(layer,count)"] = torch.tensor(list(rows.values()))
    found["tokens_out"] = outputs[-1][1].reshape(len(video), -1, outputs[-1][1].shape[-1])
    for name in case.expected:
        if name.startswith("gradient."):
            gradient = encoder.clip.get_parameter(ours(name.removeprefix("gradient."))).grad
            found[name] = gradient.reshape(case.expected[name].shape)
    return found
