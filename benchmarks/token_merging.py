"""Measure TempMe's token merging: operations, activations, and CPU time of a vision tower with and without it.

Operations are those of one video of 12 frames, activations what a training step keeps for its backward pass. The CPU
times are medians of runs in turns, so that their ratio does not depend on the machine's load.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from argparse import ArgumentParser
from datetime import date
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.encoders.token_merging import TempMe, encode_frames, merge_tokens

FRAMES = 12


def tower(architecture: str, merging: bool) -> nn.Module:
    """Return a vision tower with random weights."""
    torch.manual_seed(0)
    model = build_model({**model_configuration(architecture), "quick_gelu": True}, "float32").visual
    if merging:
        merge_tokens(model, TempMe(frames=FRAMES), architecture)
    return model


def encode(model: nn.Module, pixels: torch.Tensor, merging: bool) -> torch.Tensor:
    """Encode videos (M, F, 3, S, S) to frames."""
    return encode_frames(model, pixels) if merging else model(pixels.flatten(0, 1))


def counted(architecture: str, merging: bool) -> tuple[float, float]:
    """Return the multiply-accumulates in billions and the saved activations in MiB, of one video."""
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode():
        model = tower(architecture, merging)
        weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        pixels = torch.empty(1, FRAMES, 3, 224, 224)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            encode(model, pixels, merging)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            frames = encode(model, pixels, merging)
        kept = sum(size for storage, size in saved.items() if storage not in weights)
        del frames
    return counter.get_total_flops() / 2e9, kept / 2**20


def seconds(architecture: str, videos: int, rounds: int) -> dict[bool, float]:
    """Return the median CPU seconds per video by whether tokens are merged, from runs in turns."""
    towers = {merging: tower(architecture, merging).eval() for merging in (False, True)}
    pixels, times = torch.randn(videos, FRAMES, 3, 224, 224), {False: [], True: []}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for merging, model in towers.items():
                start = time.process_time()
                encode(model, pixels, merging)
                times[merging].append((time.process_time() - start) / videos)
    return {merging: statistics.median(found[1:]) for merging, found in times.items()}


def main() -> None:
    """Measure, and write the page."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--videos", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "token-merging.md")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a waiting thread would count as CPU time
    lines = [
        "# Token merging (TempMe)",
        "",
        f"`python benchmarks/token_merging.py --videos {args.videos} --rounds {args.rounds}`, {date.today()}, "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}.",
        "",
        "One video of 12 frames through the vision tower, without LoRA, random weights, float32. Operations are "
        "multiply-accumulates in billions, with the comparison of the tokens; activations are what a step keeps for "
        "its backward pass; CPU time is the median of runs in turns, with one thread.",
        "",
        "| tower | operations | with merging | activations, MiB | with merging | CPU s per video | with merging |",
        "|---|---|---|---|---|---|---|",
    ]
    for architecture in ("ViT-B-32", "ViT-B-16"):
        (plain, kept), (fewer, less) = (counted(architecture, merging) for merging in (False, True))
        times = seconds(architecture, args.videos, args.rounds)
        cells = [f"{plain:.2f}", f"{fewer:.2f} ({fewer / plain - 1:+.0%})", f"{kept:.0f}"]
        cells += [f"{less:.0f} ({less / kept - 1:+.0%})", f"{times[False]:.2f}"]
        cells += [f"{times[True]:.2f} ({times[True] / times[False] - 1:+.0%})"]
        lines.append(f"| {architecture} | {' | '.join(cells)} |")
    lines += [
        "",
        "The released code has 52.91 and 34.71 billion operations for ViT-B/32, and 210.76 and 161.08 for ViT-B/16, "
        "without the comparison (`tests/encoders/test_vision_towers.py` counts them exactly).",
    ]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(args.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
