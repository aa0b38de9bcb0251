"""Small random checkpoints under the names that the nine released codes save, with CLIP's vocabulary."""

from pathlib import Path

import torch
from parity.case import load_case
from parity.restated import Sizes, block_names, layer_norm, linear, random_clip
from transformers import CLIPConfig, CLIPModel

CASES = Path(__file__).parents[1] / "parity_cases"
VOCABULARY = 49408
D, F = 64, 12
HEADERS = ("meanP", "seqLSTM", "seqTransf", "tightTransf")
RECORDED = {f"clip4clip-{header}": f"clip4clip_{header}" for header in HEADERS}
RECORDED |= {"xclip": "xclip_seqTransf", "tcmgc": "tcmgc", "gare": "gare"}
"""Families of which whole checkpoints are recorded, with the similarity that the released code gave."""
FAMILIES = (*RECORDED, "drl", "ucofia", "xpool", "tmass", "gaid")


def stand_in(family):
    """Return a checkpoint of a family for real captions."""
    torch.manual_seed(0)
    if family in ("drl", "ucofia"):
        return {"drl": drl, "ucofia": ucofia}[family]()
    if family not in RECORDED:
        return pooling(family, clip_model())
    tensors = dict(load_case(CASES / f"{RECORDED[family]}.safetensors").checkpoint)
    words = "clip.token_embedding.weight"
    tensors[words] = 0.02 * torch.randn(VOCABULARY, tensors[words].shape[1])
    return with_agent(tensors) if family == "gare" else tensors


def with_agent(tensors):
    """Return GARE's checkpoint as the released code saves it: psi under two names."""
    return tensors | {f"agent.{name}": tensor.clone() for name, tensor in tensors.items() if name.startswith("psi.")}


def random(shapes, scale=0.2):
    return {n: scale * torch.randn(s) + ("norm" in n and n.endswith(".weight")) for n, s in shapes.items()}


def openai_clip(vision_layers=1):
    sizes = Sizes(vision_layers=vision_layers, patch=8, side=32, vocabulary=VOCABULARY, context=40)
    return {name: 0.5 * tensor for name, tensor in random_clip(sizes).items()}


def drl():
    shapes = {"frame_position_embeddings.weight": (40, D)}
    for side in ("text", "video"):
        shapes |= linear(f"{side}_weight_fc.0.", D, D) | linear(f"{side}_weight_fc.2.", 1, D)
    for number in range(4):
        shapes |= block_names(f"transformerClip.resblocks.{number}", D)
    return openai_clip() | random(shapes, 0.1)


def ucofia():
    """Return UCoFiA's checkpoint for 6 words and 4 frames, whose last two attentions are saved as `attn.net.*`."""
    head = load_case(CASES / "ucofia_train.safetensors").checkpoint
    tensors = openai_clip(vision_layers=12)
    last = tuple(f"clip.visual.transformer.resblocks.{number}." for number in (10, 11))
    tensors = {n.replace(".attn.", ".attn.net.") if n.startswith(last) else n: tensor for n, tensor in tensors.items()}
    return tensors | {name: tensor for name, tensor in head.items() if not name.startswith("clip.")}


def clip_model(vocabulary=VOCABULARY, positions=77, side=32, patch=16, layers=1):
    shape = {"hidden_size": D, "intermediate_size": 4 * D, "num_attention_heads": 1, "num_hidden_layers": layers}
    text = {**shape, "vocab_size": vocabulary, "max_position_embeddings": positions}
    text |= {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1}
    vision = {**shape, "image_size": side, "patch_size": patch}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=D)).eval()


def pooling(family, clip, frames=F):
    """Return a checkpoint of X-Pool, T-MASS or GAID with transformers' CLIP."""
    shapes = linear("pool_frames.linear_proj.", D, D)
    for name in ("q", "k", "v", "out"):
        shapes |= linear(f"pool_frames.cross_attn.{name}_proj.", D, D)
    for number in (1, 2, 3):
        shapes |= layer_norm(f"pool_frames.layer_norm{number}", D)
    if family != "xpool":
        shapes |= linear("stochastic.std_branch.linear_proj.", D, frames)
    if family == "gaid":
        shapes |= linear("gate_fc.", 1, 3 * D)
    tensors = {f"clip.{name}": tensor.detach() for name, tensor in clip.state_dict().items()} | random(shapes)
    if family != "xpool":
        tensors["stochastic.std_branch.learnable_scalar"] = torch.full((1,), torch.nan)  # never initialized
    return tensors | ({"stochastic.alpha": torch.tensor(0.4)} if family == "gaid" else {})
