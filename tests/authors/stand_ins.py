"""Small random checkpoints under the names that the nine released codes save, with CLIP's vocabulary."""

from pathlib import Path

import torch
from parity.case import load_case
from parity.restated import Sizes, block_names, random_checkpoint
from transformers import CLIPConfig, CLIPModel

from tvr_lightning.encoders import ClipEncoder

CASES = Path(__file__).parents[1] / "parity_cases"
VOCABULARY = 49408
D, F = 64, 12
RECORDED = {
    "clip4clip-meanP": "clip4clip_meanP",
    "clip4clip-seqLSTM": "clip4clip_seqLSTM",
    "clip4clip-seqTransf": "clip4clip_seqTransf",
    "clip4clip-tightTransf": "clip4clip_tightTransf",
    "xclip": "xclip_seqTransf",
    "tcmgc": "tcmgc",
    "gare": "gare",
}
"""Families of which whole checkpoints are recorded, with the similarity that the released code gave."""
FAMILIES = (*RECORDED, "drl", "ucofia", "xpool", "tmass", "gaid")


def stand_in(family):
    """Return a checkpoint of a family for real captions."""
    torch.manual_seed(0)
    if family in RECORDED:
        tensors = dict(load_case(CASES / f"{RECORDED[family]}.safetensors").checkpoint)
        tensors["clip.token_embedding.weight"] = 0.02 * torch.randn(
            VOCABULARY, tensors["clip.token_embedding.weight"].shape[1]
        )
        return with_agent(tensors) if family == "gare" else tensors
    return {"drl": drl, "ucofia": ucofia}[family]() if family in ("drl", "ucofia") else pooling(family)


def with_agent(tensors):
    """Return GARE's checkpoint as the released code saves it: psi under two names."""
    return tensors | {f"agent.{name}": tensor.clone() for name, tensor in tensors.items() if name.startswith("psi.")}


def openai_clip(vision_layers=1):
    sizes = Sizes(
        dimension=D, vision_layers=vision_layers, text_layers=1, patch=8, side=32, vocabulary=VOCABULARY, context=40
    )
    return {name: 0.5 * tensor for name, tensor in random_checkpoint(sizes, "meanP").items()}


def linear(name, *shape):
    return {f"{name}.weight": 0.2 * torch.randn(shape), f"{name}.bias": 0.2 * torch.randn(shape[0])}


def drl():
    tensors = openai_clip()
    for side in ("text", "video"):
        tensors |= linear(f"{side}_weight_fc.0", D, D) | linear(f"{side}_weight_fc.2", 1, D)
    for number in range(4):
        shapes = block_names(f"transformerClip.resblocks.{number}", D)
        tensors |= {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    return tensors | {"frame_position_embeddings.weight": 0.1 * torch.randn(40, D)}


def ucofia():
    tensors = openai_clip(vision_layers=12)
    wrapped = tuple(f"clip.visual.transformer.resblocks.{number}." for number in (10, 11))
    tensors = {
        name.replace(".attn.", ".attn.net.") if name.startswith(wrapped) else name: tensor
        for name, tensor in tensors.items()
    }
    head = load_case(CASES / "ucofia_train.safetensors").checkpoint  # for 6 words and 4 frames
    return tensors | {name: tensor for name, tensor in head.items() if not name.startswith("clip.")}


def pooling(family):
    shape = {"hidden_size": D, "intermediate_size": 4 * D, "num_attention_heads": 1, "num_hidden_layers": 1}
    text = {**shape, "vocab_size": VOCABULARY, "max_position_embeddings": 77}
    vision = {**shape, "image_size": 32, "patch_size": 16}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=D))
    tensors = {f"clip.{name}": tensor.detach() for name, tensor in clip.state_dict().items()}
    for name in ("q", "k", "v", "out"):
        tensors |= linear(f"pool_frames.cross_attn.{name}_proj", D, D)
    tensors |= linear("pool_frames.linear_proj", D, D)
    for number in (1, 2, 3):
        norm = {"weight": 1 + 0.1 * torch.randn(D), "bias": 0.1 * torch.randn(D)}
        tensors |= {f"pool_frames.layer_norm{number}.{kind}": tensor for kind, tensor in norm.items()}
    if family != "xpool":
        tensors |= linear("stochastic.std_branch.linear_proj", D, F)
        tensors["stochastic.std_branch.learnable_scalar"] = torch.full((1,), torch.nan)  # never initialized
    if family == "gaid":
        tensors |= linear("gate_fc", 1, 3 * D) | {"stochastic.alpha": torch.tensor(0.4)}
    return tensors


def of_vit_b_32(family):
    """Return a checkpoint with random weights and the sizes of ViT-B/32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip = ClipEncoder("ViT-B-32-quickgelu", weights="none").state_dict()
    tensors = {name: tensor.half() if tensor.ndim > 1 else tensor for name, tensor in clip.items()}
    large = {D: 512, 3 * D: 1536, 4 * D: 2048, 40: 77}
    for name, tensor in stand_in(family).items():
        if not name.startswith("clip."):
            tensors[name] = 0.02 * torch.randn([large.get(size, size) for size in tensor.shape])
    if family == "gare":  # with the recipe's four temporal layers
        first = {name: tensor for name, tensor in tensors.items() if ".resblocks.0." in name and "Clip" in name}
        tensors |= {name.replace(".0.", f".{n}."): tensor for name, tensor in first.items() for n in (1, 2, 3)}
        tensors = with_agent({name: tensor for name, tensor in tensors.items() if not name.startswith("agent.")})
    return tensors | {"clip.logit_scale": torch.tensor(4.6)}
