"""Time of a training step by part and method: data, encoders, loss over all pairs, backward, optimizer.

    python benchmarks/train.py --data fixture                               # small, on the CPU
    python benchmarks/train.py --device cuda --papers --precision bf16      # ViT-B/32, 12 frames, 32 words, batch 128
    python benchmarks/train.py --between                                    # work of the training process on a batch

`--data` reads a synthetic MSR-VTT (`tvr data synth`) with the loaders of training, and measures the wait for each
batch. Without it, pixels and captions are synthetic and there is no wait. Methods that score pairs with the pairwise
algebra are measured with their dropout, and twice without: `factorized`, and `plain`, in which every pair has its own
vector. `--papers-dropout` skips these two. Each part is the median over the steps. On a GPU, the table also shows the
MFU: the encoders' arithmetic in percent of the measured maximum of matrix products.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from evaluate import largest_memory

import tvr_lightning  # noqa: F401  first, see tvr_lightning._torchvision
from tvr_lightning import methods
from tvr_lightning.data import MSRVTT
from tvr_lightning.data.base import Needs
from tvr_lightning.data.batch import Media, PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders import ClipEncoder, Encoder, TinyClipEncoder
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.methods.gare.options import GapIncrement, GAREOptions
from tvr_lightning.methods.tcmgc.options import LanguageVideoAttention, TCMGCOptions
from tvr_lightning.methods.tmass import TMASSOptions
from tvr_lightning.methods.xpool import XPoolOptions
from tvr_lightning.pairwise import DensePairVectors, PairVectors
from tvr_lightning.training.optim import OptimizerConfig, build_optimizer

METHODS = ("CLIP4Clip", "XCLIP", "DRL", "UCoFiA", "XPool", "TMASS", "GARE", "TCMGC")
TWO_FORMS: dict[str, dict[str, Any]] = {
    "XPool": {"xpool": XPoolOptions(dropout=0.0)},
    "TMASS": {"tmass": TMASSOptions(attention=XPoolOptions(dropout=0.0))},
    "GARE": {"gare": GAREOptions(increment=GapIncrement(dropout=0.0))},
    "TCMGC": {"tcmgc": TCMGCOptions(attention=LanguageVideoAttention(dropout=0.0))},
}
PARTS = ("data", "encode", "loss", "backward", "optimizer")


@dataclass
class Size:
    """Size of a batch: B pairs, F frames, W words."""

    batch: int
    frames: int
    words: int


def build_encoder(papers: bool) -> Encoder:
    """Return ViT-B/32 with random weights, or the tiny CLIP."""
    if papers:
        return ClipEncoder("ViT-B-32", weights=None)
    return TinyClipEncoder(width=64, image_size=32)


def synthetic_batch(size: Size, encoder: Encoder, device: torch.device) -> PairBatch:
    """Return B pairs of random pixels and captions, tokenized as by the worker processes."""
    side = encoder.image_size
    pixels = torch.randint(0, 256, (size.batch, size.frames, 3, side, side), dtype=torch.uint8)
    media = Media(pixels, torch.ones(size.batch, size.frames, dtype=torch.bool))
    index = torch.arange(size.batch)
    captions = ["a man is cooking something in a kitchen"] * size.batch
    tokenize = encoder.caption_tokens(size.words)
    texts = TextBatch(captions if tokenize is None else tokenize(captions), index)
    return PairBatch(texts, VideoBatch(media, index, [f"video{i}" for i in range(size.batch)])).to(device)


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result of a function and its time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def batches(size: Size, encoder: Encoder, device: torch.device, options: argparse.Namespace) -> Iterator[PairBatch]:
    """Yield batches forever: read from `--data`, or always the same synthetic batch."""
    if options.data is None:
        batch = synthetic_batch(size, encoder, device)
        while True:
            yield batch
    data = MSRVTT(
        root=options.data, frames=size.frames, words=size.words, image_size=encoder.image_size,
        batch_size=size.batch, num_workers=options.num_workers,
    )  # fmt: skip
    data.needs = Needs(encoder.caption_tokens(size.words))
    while True:
        for batch in data.train_dataloader():
            yield batch.to(device)


def step(method: RetrievalModule, optimizer: Any, given: Iterator[PairBatch], bf16: bool) -> dict[str, float]:
    """Train a method for one step, and return the seconds of each part."""
    device, seconds = method.device, {}
    batch, seconds["data"] = timed(lambda: next(given), device)

    def encode() -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return method.pair_features(batch)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    pairs, seconds["encode"] = timed(encode, device)
    loss, seconds["loss"] = timed(lambda: sum(method.losses(pairs.float()).values()), device)
    _, seconds["backward"] = timed(loss.backward, device)
    _, seconds["optimizer"] = timed(update, device)
    return seconds


def build(name: str, form: str, size: Size, options: argparse.Namespace) -> RetrievalModule:
    """Return a method with seeded weights, without dropout if one of the two forms is given."""
    torch.manual_seed(0)
    without = form in ("factorized", "plain")
    extra = TWO_FORMS[name] if without else {}
    method = getattr(methods, name)(build_encoder(options.papers), words=size.words, frames=size.frames, **extra)
    if without:
        method.head.required_form = PairVectors if form == "factorized" else DensePairVectors
    return method.to(options.device).train()


def measure(name: str, form: str, size: Size, options: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of every part of a step, and the growth of memory in GiB."""
    device = torch.device(options.device)
    method = build(name, form, size, options)
    optimizer, _ = build_optimizer(method, OptimizerConfig(), total_steps=options.steps + 1)
    given = batches(size, method.encoder, device, options)
    before = largest_memory(options, reset=True)
    runs = [step(method, optimizer, given, options.precision == "bf16") for _ in range(options.steps + 1)][1:]
    found = {part: statistics.median(run[part] for run in runs) for part in PARTS}
    found["memory"] = (largest_memory(options) - before) / 2**30
    return found


def utilization(size: Size, seconds: float, options: argparse.Namespace) -> str:
    """Return the arithmetic of the towers in a step, in percent of the maximum of matrix products.

    The arithmetic is three times that of the forward pass, because the backward pass computes two products for each.
    """
    if options.device == "cpu" or not options.papers:
        return "-"
    width, tokens, layers = 768, 50, 12  # ViT-B/32; per token 24 D^2 for the products and 4 T D for attention
    image = tokens * layers * (24 * width**2 + 4 * tokens * width)
    text = size.words * layers * (24 * 512**2 + 4 * size.words * 512)
    arithmetic = 3 * size.batch * (size.frames * image + text)
    return f"{100 * arithmetic / seconds / ceiling(options):.0f}"


@functools.cache
def ceiling_of(dtype: torch.dtype) -> float:
    """Return the operations per second of a large matrix product on the GPU."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    seconds = min(timed(lambda: matrix @ matrix, matrix.device)[1] for _ in range(10))
    return 2 * 8192**3 / seconds


def ceiling(options: argparse.Namespace) -> float:
    return ceiling_of(torch.bfloat16 if options.precision == "bf16" else torch.float32)


def between(size: Size) -> None:
    """Print the CPU time of converting captions and pixels of a batch to the input of an encoder, before and now.

    Before, captions arrived as strings, and pixels were converted to float32, divided, shifted, and divided again.
    """
    encoder = TinyClipEncoder(width=64, image_size=32)
    tokenize = encoder.caption_tokens(size.words)
    captions = [f"a man in a {color} shirt is cooking something in a kitchen" for color in range(13 * size.batch)]
    pixels = torch.randint(0, 256, (32, size.frames, 3, 224, 224), dtype=torch.uint8)
    mean, deviation = encoder.pixel_mean, encoder.pixel_std

    def least(function: Callable[[], Any]) -> float:
        found = []
        for _ in range(4):
            start = time.process_time()
            function()
            found.append(time.process_time() - start)
        return 1000 * min(found)

    def in_bf16(function: Callable[[], Any]) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function()

    rows: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for name, count in {"captions": size.batch, "captions with DPDV's 12 descriptions each": 13 * size.batch}.items():
        tokens = tokenize(captions[:count])
        rows[f"{count} {name}"] = (
            functools.partial(tokenize, captions[:count]),
            functools.partial(encoder.tokenizer.report_truncated, tokens),
        )
    clips = f"pixels of {len(pixels)} clips of {size.frames} frames, on the CPU"
    rows[f"{clips}, float32"] = (
        lambda: (pixels.to(mean.dtype) / 255 - mean) / deviation,
        lambda: encoder._normalized(pixels),
    )
    rows[f"{clips}, bf16"] = (
        lambda: ((pixels.to(mean.dtype) / 255 - mean) / deviation).bfloat16(),
        lambda: in_bf16(lambda: encoder._normalized(pixels)),
    )
    print("| part of a batch | before, ms | now, ms |\n|---|---:|---:|")
    for name, (before, now) in rows.items():
        print(f"| {name} | {least(before):.1f} | {least(now):.1f} |", flush=True)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--papers", action="store_true", help="use the papers' sizes instead of small ones")
    parser.add_argument("--data", help="parent folder of a synthetic MSR-VTT")
    parser.add_argument("--num_workers", type=int, default=2, help="number of worker processes")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--papers-dropout", action="store_true", help="measure only with dropout, as in the papers")
    parser.add_argument("--batch", type=int, help="pairs per batch; default: 16, or 128 with --papers or --between")
    parser.add_argument("--between", action="store_true", help="measure only the work between batches")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.between else torch.get_num_threads())
    size = Size(128, 12, 32) if options.papers or options.between else Size(16, 4, 12)
    size.batch = options.batch or size.batch
    if options.between:
        between(size)
        return 0
    print(f"torch {torch.__version__}, {options.device}, {options.precision}, {size}, {options.steps} steps")
    print("| method | steps/s | clips/s | " + " | ".join(f"{part} %" for part in PARTS) + " | GiB | MFU % |")
    print("|---|" + "---:|" * (len(PARTS) + 4))
    for name in options.methods:
        steps, losses = {}, {}
        forms = ("with dropout",) if options.papers_dropout else ("with dropout", "factorized", "plain")
        for form in forms if name in TWO_FORMS else ("",):
            found = measure(name, form, size, options)
            steps[form] = whole = sum(found[part] for part in PARTS)
            losses[form] = found["loss"]
            shares = " | ".join(f"{100 * found[part] / whole:.0f}" for part in PARTS)
            speed = f"{1 / whole:.2f} | {size.batch / whole:.1f}"
            more = f"{found['memory']:.2f} | {utilization(size, whole, options)}"
            print(f"| {name}{', ' + form if form else ''} | {speed} | {shares} | {more} |", flush=True)
        if "plain" in steps:
            ratio = (
                f"step {steps['plain'] / steps['factorized']:.2f}, loss {losses['plain'] / losses['factorized']:.2f}"
            )
            print(f"| {name}, plain over factorized | {ratio} |" + " |" * (len(PARTS) + 3), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
