"""Movement of CLIP's weights in training: float16 as released, and float32 at two learning rates.

    python benchmarks/precision.py --size small
    python benchmarks/precision.py --size vit-b-32 --threads 2

CLIP4Clip with mean pooling trains on random frames and captions from random weights, with the recipe's optimizer,
clipping, and schedule over all steps. Gradients are clipped to norm 1 in every step, so that their size depends
on the number of weights and hardly on the data. The distance is the norm of the change of all weights that are float16
in the released code. `released optimizer` is a reimplementation of the released BertAdam that updates one tensor after
another.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from datetime import date
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from tvr_lightning.config.recipe_files import find_recipe
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.open_clip_encoder import OpenClipEncoder
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.features import PairedFeatures
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.training.optim import OptimizerConfig, build_optimizer, schedule_factor

SMALL = {
    "embed_dim": 64,
    "quick_gelu": True,
    "vision_cfg": {"width": 64, "layers": 1, "patch_size": 16, "image_size": 32},
    "text_cfg": {"width": 64, "heads": 1, "layers": 1, "context_length": 16, "vocab_size": 128},
}
HALF = ("attn.", "mlp.", "conv1", "text_projection", "visual.proj")


class TensorByTensor(torch.optim.Optimizer):
    """The update of the released BertAdam, one tensor and one operation at a time."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
                nn.utils.clip_grad_norm_(weight, 1.0)
                state["mean"].mul_(first).add_(weight.grad, alpha=1 - first)
                state["square"].mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
                update = state["mean"] / (state["square"].sqrt() + group["eps"])
                if group["weight_decay"] > 0:
                    update += group["weight_decay"] * weight
                weight.add_(-(group["lr"] * update))


def method(configuration: dict[str, Any], precision: str) -> CLIP4Clip:
    """Return CLIP4Clip with mean pooling and random weights, the same for every precision."""
    torch.manual_seed(0)
    encoder = OpenClipEncoder(build_model(configuration, precision), "random", encoder_precision=precision)
    return CLIP4Clip(encoder, frames=1, words=16)


def weights(module: CLIP4Clip) -> dict[str, Tensor]:
    """Return copies of the weights that are float16 in the released code."""
    named = module.encoder.clip.named_parameters()
    return {name: p.detach().clone() for name, p in named if any(part in name for part in HALF)}


def train(module: CLIP4Clip, config: OptimizerConfig, steps: int, pairs: int, by_tensor: bool) -> tuple[float, float]:
    """Train and return the distance moved and the mean norm of the gradients before clipping."""
    optimizer, schedule = build_optimizer(module, config, total_steps=steps)
    if by_tensor:
        groups = [{**group, "lr": group["initial_lr"]} for group in optimizer.param_groups]
        optimizer = TensorByTensor(groups, config.betas, config.eps)
    start, norms = weights(module), []
    size, vocabulary = module.encoder.image_size, module.encoder.clip.vocab_size
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        pixels = torch.randint(0, 256, (pairs, 1, 3, size, size), dtype=torch.uint8, generator=generator)
        ids = torch.randint(1, vocabulary - 2, (pairs, 16), generator=generator)
        ids[:, 0], ids[:, -1] = vocabulary - 2, vocabulary - 1
        text = module.encode_text(module.encoder.encode_tokens(ids))
        video = module.encode_video(module.encoder.encode_video(Media(pixels, torch.ones(pairs, 1, dtype=torch.bool))))
        index = torch.arange(pairs)
        loss = module.losses(PairedFeatures(text, video, index, index))["info_nce"]
        module.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
        if by_tensor:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * schedule_factor(config, step, steps)
        optimizer.step()
        if not by_tensor:
            schedule.step()
        module.temperature.clamp()
    now = weights(module)
    moved = math.sqrt(sum(float((now[name].double() - start[name].double()).square().sum()) for name in now))
    return moved, sum(norms) / len(norms)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("small", "vit-b-32"), default="small")
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 500])
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a frame and a caption in each step")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    configuration = SMALL if options.size == "small" else {**model_configuration("ViT-B-32"), "quick_gelu": True}
    recipe = yaml.safe_load(find_recipe("clip4clip").read_text())["model"]["init_args"]["optimizer"]
    variant = yaml.safe_load(find_recipe("variants/float32").read_text())["model"]["init_args"]["optimizer"]
    released, faster = recipe["encoder_lr"], variant["encoder_lr"]
    print(f"{date.today()}, torch {torch.__version__}, {platform.machine()}, {options.size}, {options.pairs} pairs\n")
    print("| steps | CLIP's weights | optimizer | learning rate | distance | distance / float16 | gradient norm | s |")
    print("|---:|---|---|---:|---:|---:|---:|---:|", flush=True)
    for steps in options.steps:
        usual = 0.0
        for precision, rate, by_tensor in (
            ("float16", released, False),
            ("float16", released, True),
            ("float32", released, False),
            ("float32", faster, False),
        ):
            begun = time.perf_counter()
            config = OptimizerConfig(**{**recipe, "encoder_lr": rate})
            moved, norm = train(method(configuration, precision), config, steps, options.pairs, by_tensor)
            usual = usual or moved
            name = "released optimizer" if by_tensor else "ours"
            seconds = time.perf_counter() - begun
            print(
                f"| {steps} | {precision} | {name} | {rate:.0e} | {moved:.3e} | {moved / usual:.3f} | {norm:.2f} "
                f"| {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
