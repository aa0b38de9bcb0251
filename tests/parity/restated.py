"""Random weights of CLIPs of any sizes, and a plain restatement of the released optimizers."""

from dataclasses import dataclass

import torch


@dataclass
class Sizes:
    """Sizes of a random CLIP."""

    dimension: int = 64
    vision: int = 64
    text_layers: int = 1
    vision_layers: int = 1
    patch: int = 4
    side: int = 12
    context: int = 11
    vocabulary: int = 50


def linear(name, outputs, inputs):
    return {f"{name}weight": (outputs, inputs), f"{name}bias": (outputs,)}


def layer_norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def block_names(prefix, width):
    return (
        linear(f"{prefix}.attn.in_proj_", 3 * width, width)
        | linear(f"{prefix}.attn.out_proj.", width, width)
        | linear(f"{prefix}.mlp.c_fc.", 4 * width, width)
        | linear(f"{prefix}.mlp.c_proj.", width, 4 * width)
        | layer_norm(f"{prefix}.ln_1", width)
        | layer_norm(f"{prefix}.ln_2", width)
    )


def random_clip(sizes):
    """Return random tensors of a CLIP under OpenAI's names with the prefix `clip.`."""
    shapes = {
        "clip.positional_embedding": (sizes.context, sizes.dimension),
        "clip.text_projection": (sizes.dimension, sizes.dimension),
        "clip.token_embedding.weight": (sizes.vocabulary, sizes.dimension),
        **layer_norm("clip.ln_final", sizes.dimension),
        "clip.visual.class_embedding": (sizes.vision,),
        "clip.visual.positional_embedding": ((sizes.side // sizes.patch) ** 2 + 1, sizes.vision),
        "clip.visual.proj": (sizes.vision, sizes.dimension),
        "clip.visual.conv1.weight": (sizes.vision, 3, sizes.patch, sizes.patch),
        **layer_norm("clip.visual.ln_pre", sizes.vision),
        **layer_norm("clip.visual.ln_post", sizes.vision),
    }
    for n in range(sizes.text_layers):
        shapes |= block_names(f"clip.transformer.resblocks.{n}", sizes.dimension)
    for n in range(sizes.vision_layers):
        shapes |= block_names(f"clip.visual.transformer.resblocks.{n}", sizes.vision)
    generator = torch.Generator().manual_seed(7)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in tensors:
        if name.endswith(".weight") and ".ln_" in name:
            tensors[name] += 1
    return tensors | {"clip.logit_scale": torch.tensor(2.5)}


def released_step(kind, gradient, value, mean, square, group, step):
    """Make one released step in place: modules/optimization.py of CLIP4Clip, or AdamW of transformers."""
    bert, (first, second) = kind.endswith("bert_adam"), group["betas"]
    if bert and group["per_tensor_clip"]:
        gradient = gradient * (group["per_tensor_clip"] / (gradient.norm() + 1e-6)).clamp(max=1.0)
    mean.mul_(first).add_(gradient, alpha=1 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    root = square.sqrt().add_(group["eps"])
    if bert:
        update = mean / root
        if group["weight_decay"] > 0:
            update += group["weight_decay"] * value
        value.sub_(group["lr"] * update)
        return
    rate = group["lr"] * (1 - second**step) ** 0.5 / (1 - first**step)
    value.addcdiv_(mean, root, value=-rate)
    if group["weight_decay"] > 0:
        value.add_(value, alpha=-group["lr"] * group["weight_decay"])
