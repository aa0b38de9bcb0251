"""Score all pairs with a method in three ways, and print the ratios: `python benchmarks/pairwise.py --method gare`.

1. The released computation, reimplemented in released_<method>.py, in the fastest of all blocks of 4 to 256 texts and
   4 to 256 videos: each block is timed once, and the two fastest score all pairs.
2. Our dense form, if the method has one, in the fastest of several block sizes.
3. Ours, with its default memory budget.

All three use the same head and features in the same process. Times are the minimum of several interleaved repetitions.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import released_drl
import released_gaid
import released_gare
import released_tcmgc
import released_tmass
import released_ucofia
import released_xclip
import released_xpool
import torch
from released_code import Sizes, Subject
from torch import Tensor

from tvr_lightning.features import TextFeatures, VideoFeatures

METHODS = {
    "drl": released_drl.SUBJECT,
    "gaid": released_gaid.SUBJECT,
    "gare": released_gare.SUBJECT,
    "tcmgc": released_tcmgc.SUBJECT,
    "tmass": released_tmass.SUBJECT,
    "tmass-shared-draws": released_tmass.SHARED_DRAWS,
    "ucofia": released_ucofia.SUBJECT,
    "xclip": released_xclip.SUBJECT,
    "xpool": released_xpool.SUBJECT,
}
MIB = 2**20
BLOCK_SIDES = (4, 8, 16, 32, 64, 128, 256)
LARGEST = 512 * MIB
"""Maximum size in bytes of the largest tensor of a released block; larger blocks are skipped."""


def features(count: int, args: argparse.Namespace) -> tuple[TextFeatures, VideoFeatures]:
    """Return random features of `count` texts and videos, with similar frames per video and similar words per text."""
    generator = torch.Generator().manual_seed(count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size = args.dimension
    sentence, video = normal(count, size), normal(count, 1, size)
    words = sentence.unsqueeze(1) + normal(count, args.words, size)
    frames = video + normal(count, args.frames, size)
    text = TextFeatures(sentence, words, torch.ones(count, args.words, dtype=torch.bool))
    mask = torch.ones(count, args.frames, dtype=torch.bool)
    audio = normal(count, 1, size) + normal(count, args.frames, size)
    patches = video.unsqueeze(2) + normal(count, args.frames, released_ucofia.PATCHES, size)
    videos = VideoFeatures(frames, mask, audio=audio, audio_mask=mask, patches=patches)
    return text.to(args.device), videos.to(args.device)


def seconds(function: Callable[[], object], args: argparse.Namespace) -> float:
    clock = time.process_time if args.clock == "processor" else time.perf_counter
    start = clock()
    function()
    if args.device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_memory(function: Callable[[], Tensor], device: str) -> tuple[Tensor, float]:
    """Return the result, and the largest growth of the memory of this process (on a GPU, of its memory) in MiB."""
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        return result, (torch.cuda.max_memory_allocated() - before) / MIB
    ctypes.CDLL(None).malloc_trim(0)
    before, largest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.002):
            largest = max(largest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = function()
    done.set()
    watcher.join()
    return result, max(largest - before, 0) / MIB


def best_blocks(subject: Subject, run: Callable[..., Tensor], count: int, sizes: Sizes) -> list[tuple[int, int]]:
    """Return the two fastest blocks (texts, videos) of the released computation, timing each once after a warm-up."""
    sides = [side for side in BLOCK_SIDES if side <= count]
    limit = LARGEST // (4 * subject.pair_numbers(sizes))
    blocks = [(texts, videos) for texts in sides for videos in sides if texts * videos <= limit]
    spent = {block: run(*block) for block in blocks}
    return sorted(spent, key=lambda block: spent[block])[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=sorted(METHODS), required=True)
    parser.add_argument(
        "--pairs", type=int, help="number of texts and of videos to compare; default: that of the method"
    )
    parser.add_argument(
        "--many", type=int, default=1000, help="number of texts and of videos for the throughput; 0: none"
    )
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--frames", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: CPU time, which does not depend on other processes; only meaningful with one thread",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    subject = METHODS[args.method]
    count = args.pairs or subject.pairs
    text, video = features(count, args)
    heads: dict[str, tuple[str, int | None]] = {
        f"dense, blocks of {budget} MiB": ("dense", budget) for budget in subject.dense_budgets
    }
    heads["ours"] = ("factorized", None)
    sizes = Sizes(args.dimension, args.words, args.frames)
    built = {name: subject.build(form, budget, sizes).to(args.device) for name, (form, budget) in heads.items()}
    fast = built["ours"]

    def seconds_per_pair(texts: int, videos: int) -> float:
        block = partial(subject.released_block, fast, text[:texts], video[:videos])
        block()
        return seconds(block, args) / (texts * videos)

    runs: dict[str, Callable[[], Tensor]] = {
        f"{subject.title}, blocks of {texts} x {videos}": partial(subject.released, fast, text, video, texts, videos)
        for texts, videos in best_blocks(subject, seconds_per_pair, count, sizes)
    }
    released = list(runs)
    runs |= {name: partial(subject.score, head, text, video) for name, head in built.items()}
    results = {name: peak_memory(run, args.device) for name, run in runs.items()}  # this is also the warm-up
    expected = results[released[0]][0]
    times = dict.fromkeys(runs, math.inf)
    for _ in range(args.repetitions):
        for name, run in runs.items():
            times[name] = min(times[name], seconds(run, args))
    best = [min(released, key=lambda name: times[name])]
    dense = [name for name in built if name != "ours"]
    best += [min(dense, key=lambda name: times[name])] if dense else []
    machine = (
        torch.cuda.get_device_name()
        if args.device != "cpu"
        else f"{platform.machine()}, {args.threads} threads, {args.clock} time"
    )
    print(f"{date.today()}, {machine}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{args.method}, {count} x {count}, D = {args.dimension}, W = {args.words}, F = {args.frames}, float32\n")
    print("| computation | time / ours | largest difference | peak memory, MiB |")
    print("|---|---|---|---|")
    for name, (result, peak) in results.items():
        difference = float((result - expected).abs().max())
        ratio = times[name] / times["ours"]
        mark = " (best)" if name in best else ""
        print(f"| {name}{mark} | {ratio:.1f} | {difference:.1e} | {peak:.0f} |")
    print(f"\nbest released over ours: {times[best[0]] / times['ours']:.1f}")
    if dense:
        print(f"best dense over ours: {times[best[1]] / times['ours']:.1f}")
    if args.many:
        text, video = features(args.many, args)
        spent = seconds(lambda: subject.score(fast, text, video), args)
        print(f"ours at {args.many} x {args.many}: {args.many**2 / spent:,.0f} pairs per second")


if __name__ == "__main__":
    main()
