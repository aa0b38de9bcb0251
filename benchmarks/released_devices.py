"""Movement of CLIP's weights on four devices as released, compared with each `gather` here.

    python benchmarks/released_devices.py

CLIP4Clip trains a small random CLIP on random frames and captions with the recipe's optimizer, clipping, and schedule,
in gloo processes on the CPU. `released` restates the released gather, the mean of DDP, clipping, and BertAdam
(modules/until_module.py, modules/optimization.py, main_task_retrieval.py), one operation at a time. The logit scale
sets the size of the gradient. The movement is the change of the weights that are float16 in the released code.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import time
import warnings
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from precision import HALF, SMALL, TensorByTensor
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tvr_lightning.config.recipe_files import find_recipe
from tvr_lightning.data.batch import Media, PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.encoders.clip import SizedClipEncoder
from tvr_lightning.encoders.tuning import FineTuning
from tvr_lightning.features import FeatureBatch
from tvr_lightning.layers.temporal import MeanP, SeqTransf
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.clip4clip import CLIP4ClipOptions
from tvr_lightning.testing import random_pairs, small
from tvr_lightning.testing.processes import quiet_trainer, run_processes
from tvr_lightning.training.optim import OptimizerConfig, parameter_groups, schedule_factor

# isort: split
from lightning.pytorch import Callback  # after tvr_lightning, because it imports torchvision

PAIRS, FRAMES, WORDS, STEPS = 16, 2, 16, 10
CONFIGURATION = {**SMALL, "text_cfg": {**SMALL["text_cfg"], "layers": 2}}


@dataclass
class Case:
    """One training: its model, the size of its gradient, and the options that this project trains with.

    Attributes:
        precision: CLIP's weights; float64 is float32 training without its rounding.
        gather: Same as for `RetrievalModule`; None restates the released code.
        encoder_lr: Learning rate of CLIP; None uses the recipe's, 1e-7.
        exchanged: Whether every device has the pairs of the next one, which changes only the order of sums.
    """

    header: Literal["mean", "transformer"] = "mean"
    precision: Literal["float16", "float32", "float64"] = "float16"
    logit_scale: float = 4.6
    gather: str | None = None
    released_devices: int | None = None
    encoder_lr: float | None = None
    exchanged: bool = False


class AllGather(torch.autograd.Function):
    """The released gather: every device keeps its own slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.count = len(tensor)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[ctx.count * dist.get_rank() : ctx.count * (dist.get_rank() + 1)]


def build(case: Case) -> CLIP4Clip:
    """Return CLIP4Clip with seeded random weights and the recipe's options."""
    recipe = yaml.safe_load(find_recipe("clip4clip").read_text())["model"]["init_args"]
    rates = {} if case.encoder_lr is None else {"encoder_lr": case.encoder_lr}
    torch.manual_seed(0)
    method = CLIP4Clip(
        SizedClipEncoder(CONFIGURATION, encoder_precision="float16" if case.precision == "float16" else "float32"),
        optimizer=OptimizerConfig(**{**recipe["optimizer"], **rates}),
        words=WORDS,
        frames=FRAMES,
        gather=case.gather or "global",
        tuning=FineTuning(**recipe["tuning"]["init_args"]),
        released_devices=case.released_devices,
        clip4clip=CLIP4ClipOptions(MeanP() if case.header == "mean" else SeqTransf(blocks=1)),
    )
    method.temperature.logit_scale.data.fill_(case.logit_scale)
    return method.double() if case.precision == "float64" else method


def batches(method: CLIP4Clip, rank: int, world: int) -> list[PairBatch]:
    """Return this process's share of the batches of all steps."""
    generator = torch.Generator().manual_seed(1)
    size, vocabulary, index = method.encoder.image_size, method.encoder.clip.vocab_size, torch.arange(PAIRS)
    found = []
    for _ in range(STEPS):
        pixels = torch.randint(0, 256, (PAIRS, FRAMES, 3, size, size), dtype=torch.uint8, generator=generator)
        ids = torch.randint(1, vocabulary - 2, (PAIRS, WORDS), generator=generator)
        ids[:, 0], ids[:, -1] = vocabulary - 2, vocabulary - 1
        text = Tokens([""] * PAIRS, ids, torch.ones_like(ids, dtype=torch.bool), [WORDS] * PAIRS)
        media = Media(pixels, torch.ones(PAIRS, FRAMES, dtype=torch.bool))
        found.append(PairBatch(TextBatch(text, index), VideoBatch(media, index, [""] * PAIRS))[rank::world])
    return found


def weights(method: CLIP4Clip) -> dict[str, Tensor]:
    """Return all weights: those that the released code stores as float16 together, and the others."""
    groups: dict[str, list[Tensor]] = {"half": [], "rest": []}
    for name, parameter in method.named_parameters():
        half = name.startswith("encoder.") and any(part in name for part in HALF)
        groups["half" if half else "rest"].append(parameter.detach().double().flatten())
    return {name: torch.cat(found) for name, found in groups.items()}


def gathered(record: FeatureBatch) -> FeatureBatch:
    """Gather the features of all devices as released, and compute with them in float32."""
    return record.apply(AllGather.apply).float()


def train_released(method: CLIP4Clip, own: list[PairBatch]) -> list[float]:
    """Train as released and return the norms of the gradients before clipping."""
    config, norms, world = method.optimizer_config, [], dist.get_world_size()
    groups = parameter_groups(method, config)
    optimizer = TensorByTensor([{**group, "rate": group["lr"]} for group in groups], config.betas, config.eps)
    for step, batch in enumerate(own):
        pairs = method.pair_features(batch)
        text, video = gathered(pairs.text), gathered(pairs.video)
        logits = method.temperature() * method.score(text, video).similarity
        rows, columns = (-part.log_softmax(-1).diagonal().mean() for part in (logits, logits.T))
        method.zero_grad()
        ((rows + columns) / 2).backward()
        for parameter in method.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(world)
                dist.all_reduce(parameter.grad)
        norms.append(float(nn.utils.clip_grad_norm_(method.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * schedule_factor(config, step, STEPS)
        optimizer.step()
        method.temperature.clamp()
    return norms


class Norms(Callback):
    """Norms of the gradients before clipping."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, method: Any, optimizer: Any) -> None:
        """Record the norm."""
        gradients = [parameter.grad for parameter in method.parameters() if parameter.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


def train(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Train each case in the processes that work together; return movements and gradient norms."""
    world, results = dist.get_world_size() if dist.is_initialized() else 1, []
    for case in cases:
        method = build(case)
        start, own, recorder = weights(method), batches(method, (rank + case.exchanged) % world, world), Norms()
        if case.gather is None:
            recorder.norms = train_released(method, own)
        else:
            precision = "64-true" if case.precision == "float64" else "32-true"
            trainer = quiet_trainer(
                devices=world, max_epochs=1, gradient_clip_val=1.0, precision=precision, callbacks=[recorder],
                strategy="ddp" if world > 1 else "auto",
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="You defined a .validation_step")
                trainer.fit(method.train(), DataLoader(own, batch_size=None))  # type: ignore[arg-type]
        moved = {name: after - start[name] for name, after in weights(method).items()}
        results.append({**moved, "norms": torch.tensor(recorder.norms)})
    return results


def compared(found: dict[str, Tensor], released: dict[str, Tensor], part: str = "half") -> tuple[float, float]:
    """Return the ratio of the lengths of two movements, and their cosine."""
    ours, theirs = found[part], released[part]
    return float(ours.norm() / theirs.norm()), float(nn.functional.cosine_similarity(ours, theirs, dim=0))


def repetition(recipe: str, last: int = 13) -> tuple[float, float]:
    """Return the relative change of the gradient of a last step of odd size by the repeated pair of two devices.

    The repeated pair is the first of the epoch: another one than those of the last step, or, if the epoch has one step
    only, a copy of one of them. Nothing is random in the gradient, as in evaluation.
    """
    method = small(find_recipe(recipe))[0].eval()
    pairs = random_pairs(method, last + 1)

    def gradient(rows: list[int]) -> Tensor:
        method.zero_grad()
        torch.manual_seed(0)
        terms = method.losses(method.pair_features(pairs[torch.tensor(rows)]))
        torch.stack([*terms.values()]).sum().backward()
        return torch.cat([p.grad.flatten() for p in method.parameters() if p.grad is not None])

    rows = list(range(last))
    alone = gradient(rows)
    other, copy = (float((gradient([*rows, extra]) - alone).norm() / alone.norm()) for extra in (last, 0))
    return other, copy


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    devices, begun = parser.parse_args().devices, time.perf_counter()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    variant = yaml.safe_load(find_recipe("variants/float32").read_text())["model"]["init_args"]["optimizer"]
    sizes = [Case(header, logit_scale=scale) for header in ("mean", "transformer") for scale in (0.0, 1.8, 4.6)]
    changes: list[tuple[str, int, dict[str, Any]]] = [
        ("released, pairs exchanged", devices, {"exchanged": True}),
        ("`global`", devices, {"gather": "global"}),
        ("`own-slice`", devices, {"gather": "own-slice"}),
        (f"`own-slice`, `released_devices: {devices}`", 1, {"gather": "own-slice", "released_devices": devices}),
        ("`global`, float32, 1e-7", 1, {"gather": "global", "precision": "float32"}),
        ("`global`, variants/float32.yaml", 1, {"gather": "global", "precision": "float32", **variant}),
    ]
    several = [change for _, count, change in changes if count > 1]
    cases = [replace(case, **change) for case in sizes for change in [{}, *several]]
    together = iter(run_processes(train, devices, cases)[0])
    print(f"{date.today()}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {STEPS} steps\n")
    print("| frames | training | devices | gradient norm before clipping | movement / released | cosine |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for case in sizes:
        released = next(together)
        rows = [("released", devices, released)]
        for name, count, change in changes:
            rows.append((name, count, next(together) if count > 1 else train(0, [replace(case, **change)])[0]))
        for name, count, found in rows:
            ratio, cosine = compared(found, released)
            low, high = float(found["norms"].min()), float(found["norms"].max())
            print(f"| {case.header} | {name} | {count} | {low:.2g} to {high:.2g} | {ratio:.3f} | {cosine:.4f} |")
    for recipe in ("xpool", "tmass", "gaid"):
        other, copy = repetition(recipe)
        print(f"\n{recipe}: a repeated pair changes the gradient by {other:.2f} of its length, a copy by {copy:.2f}")
    print(f"\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
