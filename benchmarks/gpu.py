"""All figures that only a GPU can give, in one call: `python benchmarks/gpu.py --out benchmarks/results/gpu.md`.

It runs the other benchmarks one after another, each in a process of its own, and writes what they print to one page:
a training step by parts with memory and MFU in float32 and bf16 (train.py), a step of the heads with features given
against the released code (train_heads.py), scoring all pairs against the released code (pairwise.py), ranks and table
of 1,000 texts and 1,000 videos as in 1k-A (evaluate.py), and in this process the kernels of an optimiser step and the
error of TF32 in the heads' products. `--device cpu --small` runs all of it in a minute or two, to see that it works. A
part that fails is named with its last line, and the others go on.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tvr_lightning.training.released_optimizers import BertAdam

HERE = Path(__file__).parent


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of every part by its title."""
    device = ["--device", args.device]
    size = ["--methods", "CLIP4Clip", "--steps", "1"] if args.small else ["--papers"]
    heads = ["--dimension", "64", "--words", "12", "--frames", "4", "--repetitions", "1", "--pairs", "12"]
    pairs = ["--dimension", "64", "--words", "12", "--frames", "4", "--repetitions", "1", "--pairs", "8", "--many", "0"]
    small = args.small
    found = {
        "A training step by parts, float32": ["train.py", *device, *size],
        "A training step by parts, bf16": ["train.py", *device, *size, "--precision", "bf16"],
        "A step of the heads, features given": ["train_heads.py", *device, *(heads if small else [])],
    }
    for method in ("xpool",) if small else ("gare", "tcmgc", "gaid", "xpool"):
        found[f"Scoring all pairs: {method}"] = ["pairwise.py", "--method", method, *device, *(pairs if small else [])]
    ranked = ["--items", "50", "--dimension", "64", "--methods", "CLIP4Clip", "GARE"] if small else []
    found["Ranks and table, 1k-A"] = ["evaluate.py", "methods", *device, *ranked]
    return found


def run(command: list[str]) -> str:
    """Return what a benchmark prints, or its last line where it fails."""
    done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], capture_output=True, text=True)
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
    return done.stdout.strip()


def launches(step: Callable[[], object], device: str) -> int:
    """Return how many kernels a step starts on a GPU; on a CPU how many operators it calls."""
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[ProfilerActivity.CPU, kind] if device == "cuda" else [kind]) as found:
        step()
    if device == "cuda":
        return sum(event.count for event in found.key_averages() if str(event.device_type).endswith("CUDA"))
    operators = [event for event in found.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in operators)


def optimiser(args: argparse.Namespace) -> str:
    """Return kernels per step of BertAdam for the tensors of a ViT-B/32, and of AdamW in one kernel and in several."""
    width, layers = (8, 2) if args.small else (512, 24)
    shapes = [(width, width), (width,), (3 * width, width), (3 * width,), (width,), (width,)] * 2 * layers
    lines = ["| optimiser | tensors | launches |", "|---|---:|---:|"]
    for name, make in {
        "BertAdam": lambda tensors: BertAdam(tensors),
        "AdamW, foreach": lambda tensors: torch.optim.AdamW(tensors, foreach=True),
        "AdamW, fused": lambda tensors: torch.optim.AdamW(tensors, fused=True),
    }.items():
        tensors = [nn.Parameter(torch.randn(shape, device=args.device)) for shape in shapes]
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        made = make(tensors)
        made.step()  # makes the state
        lines.append(f"| {name} | {len(tensors)} | {launches(made.step, args.device)} |")
    return "\n".join(lines)


def tf32(args: argparse.Namespace) -> str:
    """Return the error of TF32 in a linear layer of the heads, against float64, and how much faster it is."""
    if args.device != "cuda":
        return "a CPU has no TF32"
    vectors, matrix = torch.randn(16384, 512, device="cuda"), torch.randn(512, 512, device="cuda") / 512**0.5
    exact = vectors.double() @ matrix.double()
    lines = ["| products | largest error | microseconds |", "|---|---:|---:|"]
    for name, allowed in (("float32", False), ("TF32", True)):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            found = vectors @ matrix
        begun.record()
        for _ in range(20):
            found = vectors @ matrix
        ended.record()
        torch.cuda.synchronize()
        error = float((found.double() - exact).abs().max())
        lines.append(f"| {name} | {error:.1e} | {begun.elapsed_time(ended) / 20 * 1000:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure all parts and write the page; returns 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--out", type=Path, help="page to write; else it is printed")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --small shows that everything runs")
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    page = [f"# What a GPU takes\n\n`{command}`, {date.today()}, {machine}, torch {torch.__version__}"]
    failed = False
    for title, words in commands(args).items():
        found = run(words)
        failed = failed or found.startswith("failed")
        page.append(f"## {title}\n\n`python benchmarks/{' '.join(words)}`\n\n{found}")
        print(f"{title}: {found.splitlines()[-1]}", flush=True)
    page.append(f"## Launches of an optimiser step\n\n{optimiser(args)}")
    page.append(f"## TF32 in the heads' products\n\n{tf32(args)}")
    text = "\n\n".join(page) + "\n"
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
