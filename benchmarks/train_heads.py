"""Time of a training step of the heads on given features, compared with the released code.

    python benchmarks/train_heads.py                     # GARE and X-Pool on 128 pairs, TC-MGC on 48, CPU time

Both compute the losses of the paper (its default options, dropout 0.3) and all gradients on the same head and features,
without the optimizer. "As released" is a reimplementation of the released code (released_<method>.py) with torch's
dropout and GARE's released losses, on all pairs at once as in its training; InfoNCE and TC-MGC's decorrelation are ours
in both. Times are the minimum of several interleaved repetitions in one process.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Callable
from datetime import date

import pairwise
import released_gare
import released_tcmgc
import released_xpool
import torch
from torch import Tensor

from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.features import PairedFeatures, Scores
from tvr_lightning.methods import GARE, TCMGC, XPool
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.training.losses import info_nce

PAIRS = {"gare": 128, "xpool": 128, "tcmgc": 48}


def gare(method: GARE, pairs: PairedFeatures) -> Tensor:
    """Return the loss of GARE's released code."""
    return released_gare.released_losses(method, pairs.text, pairs.video)


def xpool(method: XPool, pairs: PairedFeatures) -> Tensor:
    """Return the loss on the scores of X-Pool's released code."""
    similarity = released_xpool.released_block(method.head, pairs.text, pairs.video)
    return info_nce(method.temperature() * similarity)


def tcmgc(method: TCMGC, pairs: PairedFeatures) -> Tensor:
    """Return the loss on the scores of TC-MGC's released code."""
    parts, scale = released_tcmgc.released_scores(method.head, pairs.text, pairs.video), method.temperature()
    scores = Scores(method.head.aggregate(parts.movedim(-1, 0), scale), dict(enumerate(parts.unbind(-1))))
    decorrelation = method.options.decorrelation.weight * method.head.decorrelation(scores, scale)
    return info_nce(scale * scores.similarity) + decorrelation


def ours(method: RetrievalModule, pairs: PairedFeatures) -> Tensor:
    """Return the loss of the method."""
    return torch.stack(list(method.losses(pairs).values())).sum()


METHODS: dict[str, Callable[..., RetrievalModule]] = {"gare": GARE, "xpool": XPool, "tcmgc": TCMGC}
RELEASED: dict[str, Callable[..., Tensor]] = {"gare": gare, "xpool": xpool, "tcmgc": tcmgc}


def build(name: str, args: argparse.Namespace) -> RetrievalModule:
    """Return a method in training mode with the paper's head for features of the given sizes."""
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=args.dimension, vision_layers=1, text_layers=4)
    method = METHODS[name](encoder, words=args.words, frames=args.frames)
    for parameter in method.head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return method.train()


def step(
    method: RetrievalModule, pairs: PairedFeatures, args: argparse.Namespace, loss: Callable[..., Tensor] = ours
) -> float:
    """Return the seconds of a step."""
    method.zero_grad()
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    if args.device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    loss(method, pairs).backward()
    if args.device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=sorted(PAIRS), default=sorted(PAIRS))
    parser.add_argument("--pairs", type=int, help="pairs per batch; default: that of the method")
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--frames", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here = f"{platform.machine()}, 1 thread, CPU time"
    machine = here if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{date.today()}, {machine}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    print("| method | pairs | as released, s | ours, s | released / ours |")
    print("|---|---:|---:|---:|---:|")
    for name in args.methods:
        count = args.pairs or PAIRS[name]
        text, video = pairwise.features(count, args)
        video.patches = video.audio = video.audio_mask = None
        methods = [build(name, args).to(args.device) for _ in range(2)]
        index = torch.arange(count, device=args.device)
        pairs = PairedFeatures(text, video, index, index)
        times = [math.inf] * 2
        for _ in range(args.repetitions + 1):
            for number, (method, loss) in enumerate(zip(methods, (RELEASED[name], ours), strict=True)):
                times[number] = min(times[number], step(method, pairs, args, loss))
        released, own = times
        print(f"| {name} | {count} | {released:.3f} | {own:.3f} | {released / own:.2f} |", flush=True)


if __name__ == "__main__":
    main()
