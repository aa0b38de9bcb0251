"""Memory and CPU time of a training step with a fully trained encoder, with LoRA, and with a frozen encoder.

    python benchmarks/tuning.py                                          # every method with a tiny encoder
    python benchmarks/tuning.py --methods XPool --encoder ViT-B-32       # with random weights

A step encodes random clips and captions, computes the loss, and updates the weights. `kept` is what the graph keeps for
the backward pass, apart from the weights. `frozen video` freezes the video tower and adds LoRA to the text tower.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.testing.small import method_recipes, random_pairs, small
from tvr_lightning.training.optim import build_optimizer

RECIPES = method_recipes(Path(__file__).parents[1] / "recipes")
TUNINGS = {
    "full": {"class_path": "FineTuning"},
    "LoRA": {"class_path": "LoRA"},
    "LoRA, frozen video": {"class_path": "LoRA", "init_args": {"towers": ["text"]}},
    "frozen": {"class_path": "Frozen"},
}


def built(title: str, tuning: str, architecture: str) -> RetrievalModule:
    """Return a method with an encoder of random weights."""
    overrides = [f"--model.init_args.tuning={json.dumps(TUNINGS[tuning])}"]
    if architecture != "tiny":
        options = {"architecture": architecture, "weights": None, "encoder_precision": "float32"}
        encoder = {"class_path": "ClipEncoder", "init_args": options}
        overrides.append(f"--model.init_args.encoder={json.dumps(encoder)}")
        if title == "GAID":
            overrides.append("--model.init_args.audio_encoder=TinyWhisperEncoder")
    return small(RECIPES[title], *overrides)[0].train()


def measure(method: RetrievalModule, pairs: int, steps: int) -> tuple[int, float]:
    """Return the bytes kept for the backward pass, and the median CPU seconds of a step after the first."""
    optimizer, _ = build_optimizer(method, method.optimizer_config, steps + 1, epochs=1)
    batch = random_pairs(method, pairs)
    weights = {tensor.untyped_storage().data_ptr() for tensor in method.state_dict().values()}
    kept: dict[int, int] = {}
    seconds = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(steps + 1):
        kept.clear()
        start = time.process_time()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = method.pair_features(batch)
            loss = torch.stack(list(method.contrast.terms(method.losses, found).values())).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    return sum(kept.values()), statistics.median(seconds[1:])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--encoder", default="tiny", help="open_clip architecture, or tiny")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = f"{args.encoder}, {args.pairs} pairs, 4 frames, 12 tokens"
    print(f"{date.today()}, {platform.machine()}, torch {torch.__version__}, one thread, {shape}\n")
    print("| method | encoder | kept, MiB | CPU s per step | trained parameters, M | trained, MiB |")
    print("|---|---|---:|---:|---:|---:|")
    for title in args.methods:
        for tuning in TUNINGS:
            method = built(title, tuning, args.encoder)
            trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
            kept, seconds = measure(method, args.pairs, args.steps)
            count, size = sum(map(Tensor.numel, trained)) / 1e6, sum(p.nbytes for p in trained) / 2**20
            print(f"| {title} | {tuning} | {kept / 2**20:.1f} | {seconds:.2f} | {count:.2f} | {size:.2f} |", flush=True)


if __name__ == "__main__":
    main()
