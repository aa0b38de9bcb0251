"""All measurements that need GPUs: `python benchmarks/gpu.py --devices 8 --out benchmarks/results/gpu.md`.

On one device, it measures optimizer steps of every method from pixels and from features, with memory, MFU, and the
number of times that a step waits for the device; scores of bf16 and float32 encoders; heads, scoring of all pairs, and
ranks compared with the released code (train_heads.py, pairwise.py, evaluate.py); kernels of an optimizer step; and the
error of TF32. On N devices, it compares the losses of one device, DDP, and FSDP2 over the same steps, and of runs that
resume with another strategy.

The most important parts are measured first, and the page is written after each row. On a GPU, the page lists parts that
no longer fit into `--minutes` as not run.

Weights and inputs are random and data is synthetic, so no download is needed. `--device cpu --small` runs everything
on gloo in a few minutes, to test that it works. These values do not describe a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tvr_lightning  # noqa: F401  first, see tvr_lightning._torchvision
from tvr_lightning.config.recipe import Recipe
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.data.batch import PairBatch
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.reproduce.profile.costs import (
    batch_loss,
    build_untrained,
    count_flops,
    median_seconds,
    random_batch,
    repeated,
)
from tvr_lightning.reproduce.report.table_view import markdown_table
from tvr_lightning.synthetic import synthesize
from tvr_lightning.testing import method_recipes, small
from tvr_lightning.testing.small import unconditioned
from tvr_lightning.training.optim import build_optimizer
from tvr_lightning.training.released_optimizers import BertAdam

HERE = Path(__file__).parent
COUNTED = 8  # pairs of the batch whose operations are counted
COMPILED = ("CLIP4Clip", "XPool")
FIRST = ("CLIP4Clip", "XPool", "DPDV", "TCMGC", "GAID")  # methods that are measured before the others
Row = dict[str, str]
STRATEGIES = {
    "one device": ["--trainer.devices=1"],
    "DDP": ["--trainer.strategy=DDPStrategy", "--trainer.strategy.broadcast_buffers=false"],
    "FSDP2": [
        "--trainer.strategy=lightning.pytorch.strategies.ModelParallelStrategy",
        "--trainer.strategy.tensor_parallel_size=1", "--trainer.strategy.save_distributed_checkpoint=false",
    ],
}  # fmt: skip


def built(recipe: Path, args: argparse.Namespace, *overrides: str) -> RetrievalModule:
    """Build a recipe's method with random weights, at full size or at the size of the tests."""
    if args.small:
        return small(recipe, *overrides)[0]
    model: RetrievalModule = build_untrained(Recipe.parse([recipe], ["--data.init_args.root=.", *overrides])).model
    return model.to(args.device)


def seconds(step: Callable[[], object], args: argparse.Namespace) -> float:
    """Return the median time of a step."""
    return median_seconds(step, torch.device(args.device), args.steps)


@functools.cache
def ceiling(device: str, dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product."""
    side = 8192 if device == "cuda" else 512
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    return 2 * side**3 / seconds(lambda: matrix @ matrix, argparse.Namespace(device=device, steps=10))


def encoded(method: RetrievalModule, batch: PairBatch) -> PairBatch:
    """Return a batch with features of the encoders, as if read from a feature store."""
    with torch.no_grad():
        text, video = unconditioned(method, batch)
    texts, videos = dataclasses.replace(batch.text, text=text), dataclasses.replace(batch.video, video=video)
    return dataclasses.replace(batch, text=texts, video=videos)


def distinct_batch(method: RetrievalModule, args: argparse.Namespace) -> PairBatch:
    """Return random pairs with a different caption of 5 to 20 words each, as tokens, as the data loader does it."""
    batch = random_batch(method, args.batch)
    captions = [" ".join(f"word{row} number{place}" for place in range(3 + row % 8)) for row in range(args.batch)]
    tokenize = method.encoder.caption_tokens(method.words)
    if tokenize is None:
        return dataclasses.replace(batch, text=dataclasses.replace(batch.text, text=captions))
    device = torch.device(args.device)
    described = [tokenize([f"{caption} {place}" for place in range(6)]).to(device) for caption in captions]
    texts = dataclasses.replace(batch.text, text=tokenize(captions).to(device))
    return dataclasses.replace(batch, text=texts, extras={"recover_captions": described})


def training(args: argparse.Namespace) -> Iterator[Row]:
    """Yield steps per second, memory, MFU, and waits of every method, in the recipe's precision and in bf16."""
    bf16 = [] if args.small else [f"--config={RECIPES / 'variants' / 'float32.yaml'}"]
    compiled = [*bf16, f"--config={RECIPES / 'hardware' / 'compiled.yaml'}"]
    for title, recipe in sorted(method_recipes(RECIPES).items(), key=lambda item: item[0] not in FIRST):
        variants = {"recipe": [], "bf16": bf16}
        if title in COMPILED and not args.small:
            variants["bf16, compiled"] = compiled
        for precision, overrides in variants.items():
            try:
                found = training_costs(built(recipe, args, *overrides), precision != "recipe", args)
            except torch.OutOfMemoryError:
                found = {"steps/s from pixels": "out of memory"}
            yield {"method": title, "precision": precision, **found}
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()


def training_costs(method: RetrievalModule, bf16: bool, args: argparse.Namespace) -> dict[str, str]:
    """Return the costs of a method's optimizer step, with encoders in bf16 or in the precision of the recipe."""
    half = functools.partial(torch.autocast, args.device, torch.bfloat16, enabled=bf16)
    batch = distinct_batch(method, args)
    optimizer, _ = build_optimizer(method, method.optimizer_config, total_steps=100, epochs=1)

    def step(given: PairBatch) -> None:
        optimizer.zero_grad()
        batch_loss(method, given, half).backward()
        optimizer.step()

    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pixels = seconds(lambda: step(batch), args)
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}" if args.device == "cuda" else "-"
    waits = waits_of(lambda: step(batch), args.device)
    features = encoded(method, batch)
    flops = count_flops(method, repeated(batch, COUNTED))
    arithmetic = flops["training_step"] * args.batch / COUNTED  # too low by what the scores of more pairs take
    released = any(p.dtype == torch.float16 for p in method.parameters())
    dtype = torch.bfloat16 if bf16 else torch.float16 if released else torch.float32
    return {
        "steps/s from pixels": f"{1 / pixels:.2f}",
        "from features": f"{1 / seconds(lambda: step(features), args):.2f}",
        "GiB": memory,
        "MFU %": f"{100 * arithmetic / pixels / ceiling(args.device, dtype):.0f}",
        "waits per step": waits,
        "bf16 score error": f"{score_error(method, batch, half):.3f}",
    }


def waits_of(step: Callable[[], object], device: str) -> str:
    """Return the number of times that a step waits for a GPU."""
    if device != "cuda":
        return "-"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return str(sum("synchronizing CUDA operation" in str(each.message) for each in found))


@torch.no_grad()
def score_error(method: RetrievalModule, batch: PairBatch, half: Callable[[], Any]) -> float:
    """Return the largest change of a score due to the encoders' precision, in standard deviations of the scores."""
    method.eval()

    def scores() -> Tensor:
        pairs = method.pair_features(batch).float()
        return method.score(pairs.text, pairs.video).similarity.float()

    torch.manual_seed(0)
    exact = scores()
    torch.manual_seed(0)
    with half():
        pairs = method.pair_features(batch).float()
    found = method.score(pairs.text, pairs.video).similarity.float()
    method.train()
    return float((found - exact).abs().max() / exact.std())


def fitted(folder: Path, data: Path, strategy: str, args: argparse.Namespace, *more: str) -> tuple[Path, pd.Series]:
    """Train with the command line on the devices, and return the folder of the run and the loss of each step."""
    middle = args.fitted_steps // 2 + 2  # not the last step of an epoch, which writes no running.ckpt
    words = [
        sys.executable, "-m", "tvr_lightning.cli", "fit", f"--config={RECIPES / 'clip4clip.yaml'}",
        f"--config={RECIPES / 'fixture.yaml'}", f"--data.init_args.root={data}", "--data.init_args.batch_size=16",
        "--data.init_args.num_workers=0", f"--trainer.max_steps={args.fitted_steps}", "--trainer.log_every_n_steps=1",
        "--trainer.max_epochs=-1", "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false",
        "--model.init_args.optimizer.lr=1e-4", "--model.init_args.optimizer.encoder_lr=1e-4",
        "--model.init_args.optimizer.warmup=0.1", f"--trainer.accelerator={'gpu' if args.device == 'cuda' else 'cpu'}",
        f"--trainer.devices={args.devices}", *STRATEGIES[strategy], f"--checkpoints.every_n_steps={middle}",
        f"--results.directory={folder}", *more,
    ]  # fmt: skip
    if strategy == "FSDP2":
        words.append(f"--trainer.strategy.data_parallel_size={args.devices}")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{strategy}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    (run,) = folder.glob("*/*")
    log = pd.read_csv(run / "metrics.csv").dropna(subset=["train/loss"]).set_index("step")["train/loss"]
    return run, log


def strategies(args: argparse.Namespace) -> Iterator[Row]:
    """Compare the losses of all strategies, and of runs that change the strategy, with those of one device."""

    def row(name: str, losses: pd.Series) -> Row:
        apart = float((losses / expected.loc[losses.index] - 1).abs().max())
        heads = (f"{args.devices} devices, float32", "largest relative difference in loss", "steps")
        return dict(zip(heads, (name, f"{apart:.1e}", str(len(losses))), strict=True))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthesize("msrvtt", folder / "data", 80, 0, progress=False)
        found = {each: fitted(folder / each, folder / "data", each, args) for each in STRATEGIES}
        expected = found["one device"][1]
        yield from (row(each, losses) for each, (_, losses) in found.items())
        usable = list(STRATEGIES)
        for first, then in zip(usable, [*usable[1:], usable[0]], strict=True):
            saved = found[first][0] / "checkpoints" / "running.ckpt"
            losses = fitted(folder / f"{first}-{then}", folder / "data", then, args, f"--ckpt_path={saved}")[1]
            yield row(f"{first}, resumed under {then}", losses)


def other_benchmarks(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the commands of the other benchmarks by their titles."""
    device = ["--device", args.device]
    heads = ["--dimension", "64", "--words", "12", "--frames", "4", "--repetitions", "1", "--pairs", "12"]
    pairs = ["--dimension", "64", "--words", "12", "--frames", "4", "--repetitions", "1", "--pairs", "8", "--many", "0"]
    ranked = ["--items", "50", "--dimension", "64", "--methods", "CLIP4Clip", "GARE"]
    found = {"Training step of the heads": ["train_heads.py", *device, *(heads if args.small else [])]}
    for method in ("xpool",) if args.small else ("gaid", "tcmgc", "xpool", "gare"):
        found[f"Scoring all pairs: {method}"] = ["pairwise.py", "--method", method, *device, *pairs[: 99 * args.small]]
    found["Ranks and table of 1k-A"] = ["evaluate.py", "methods", *device, *(ranked if args.small else [])]
    return found


def output(command: list[str], end: float) -> Iterator[str]:
    """Run another benchmark until a time, and yield its command and its output."""
    words, left = [sys.executable, str(HERE / command[0]), *command[1:]], end - time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=None if math.isinf(left) else left)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    yield f"`python benchmarks/{' '.join(command)}`\n\n{done.stdout.strip()}"


def launches(step: Callable[[], object], device: str) -> int:
    """Return the number of kernels that a step launches on a GPU, or of operators that it calls on a CPU."""
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[ProfilerActivity.CPU, kind] if device == "cuda" else [kind]) as found:
        step()
    if device == "cuda":
        return sum(event.count for event in found.key_averages() if str(event.device_type).endswith("CUDA"))
    operators = [event for event in found.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in operators)


def optimizers(args: argparse.Namespace) -> Iterator[Row]:
    """Count the kernels of one step of BertAdam and AdamW for the tensors of a ViT-B/32."""
    width, layers = (8, 2) if args.small else (512, 24)
    shapes = [(width, width), (width,), (3 * width, width), (3 * width,), (width,), (width,)] * 2 * layers
    for name, make in {
        "BertAdam": lambda tensors: BertAdam(tensors),
        "AdamW, foreach": lambda tensors: torch.optim.AdamW(tensors, foreach=True),
        "AdamW, fused": lambda tensors: torch.optim.AdamW(tensors, fused=True),
    }.items():
        tensors = [nn.Parameter(torch.randn(shape, device=args.device)) for shape in shapes]
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        made = make(tensors)
        made.step()  # creates the state
        yield {"optimizer": name, "tensors": str(len(tensors)), "launches": str(launches(made.step, args.device))}


def tf32(args: argparse.Namespace) -> Iterator[Row | str]:
    """Compare a linear layer of the heads in TF32 with float64, and yield its error and its time."""
    if args.device != "cuda":
        yield "A CPU has no TF32."
        return
    vectors, matrix = torch.randn(16384, 512, device="cuda"), torch.randn(512, 512, device="cuda") / 512**0.5
    exact = vectors.double() @ matrix.double()
    for name, allowed in (("float32", False), ("TF32", True)):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        error = float(((vectors @ matrix).double() - exact).abs().max())
        microseconds = f"{1e6 * seconds(lambda: vectors @ matrix, args):.0f}"
        yield {"products": name, "largest error": f"{error:.1e}", "microseconds": microseconds}
    torch.backends.cuda.matmul.allow_tf32 = False


def section(title: str, found: list[Row | str], remark: str) -> str:
    """Return the Markdown of a part: its texts, a table of its rows, and a remark on what is missing."""
    rows = [row for row in found if not isinstance(row, str)]
    table = [markdown_table(pd.DataFrame(rows).fillna("-"))] if rows else []
    return "\n\n".join([f"## {title}", *(each for each in found if isinstance(each, str)), *table, remark]).rstrip()


def write(page: list[str], out: Path | None) -> None:
    """Write the page, if it has a file."""
    if out is not None:
        out.write_text("\n\n".join(page) + "\n")


def main() -> int:
    """Measure all parts and write the page; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--devices", type=int, help="number of devices; by default, all GPUs or two CPU processes")
    parser.add_argument("--small", action="store_true", help="small sizes, to test that everything runs")
    parser.add_argument("--minutes", type=float, help="time limit; by default 4.5 on a GPU, and none on a CPU")
    parser.add_argument("--out", type=Path, help="page to write; otherwise it is printed")
    args = parser.parse_args()
    end = time.monotonic() + 60 * (args.minutes or (4.5 if args.device == "cuda" else math.inf))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU found. --device cpu --small tests that everything runs.")
    args.devices = args.devices or (torch.cuda.device_count() if args.device == "cuda" else 2)
    args.batch, args.steps, args.fitted_steps = (8, 1, 6) if args.small else (128, 10, 50)
    machine = f"{args.devices} x {torch.cuda.get_device_name()}" if args.device == "cuda" else platform.machine()
    command = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
    page = [f"# Measurements on GPUs\n\n`{command}`, {date.today()}, {machine}, torch {torch.__version__}"]
    if args.device == "cpu":
        page.append("**Run on a CPU with small sizes. This page shows what is measured, not the speed of a GPU.**")
    parts: dict[str, Callable[[], Iterator[Row | str]]] = {
        f"Optimizer steps, {args.batch} pairs": lambda: training(args),
        **{title: functools.partial(output, command, end) for title, command in other_benchmarks(args).items()},
        "Kernel launches of an optimizer step": lambda: optimizers(args),
        "TF32 in the products of the heads": lambda: tf32(args),
        "Strategies": lambda: strategies(args),
    }
    failed = False
    for title, part in parts.items():
        found: list[Row | str] = []
        page.append(section(title, found, "Not run: the time was over."))
        try:
            rows = part()
            while time.monotonic() < end and (row := next(rows, None)) is not None:
                found.append(row)
                print(f"{title}: {row if isinstance(row, str) else ', '.join(row.values())}", flush=True)
                page[-1] = section(title, found, "The time was over; rows may be missing." * (time.monotonic() > end))
                write(page, args.out)  # after each row, so that these are kept if the run is killed
        except subprocess.TimeoutExpired:
            pass  # the page already states that it was not run
        except Exception as error:  # noqa: BLE001  the other parts continue
            failed, page[-1] = True, section(title, found, f"failed: {error}")
            print(f"{title}: failed: {error}", flush=True)
        write(page, args.out)
    if args.out is None:
        print("\n\n".join(page))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
