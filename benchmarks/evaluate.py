"""Evaluation at scale: seconds per method, memory of growing galleries, and two-stage evaluation of large galleries.

    python benchmarks/evaluate.py methods --items 1000     # dense and factorized, next to the values in the papers
    python benchmarks/evaluate.py memory --items 1000 2000 4000 8000 16000 --budget 0.25
    python benchmarks/evaluate.py two-stage --items 2000 --candidates 64
    python benchmarks/evaluate.py whole --methods X-CLIP TC-MGC     # a complete `tvr test` on stored features

Features are random, with the frames of each video close to its text, so that ranks are meaningful. Both directions are
ranked by the evaluator that `tvr test` uses. `memory` starts a separate process for each number of items. CPU times are
those of the measured process, so other processes do not add to them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import released_gaid
import released_gare
import released_tcmgc
import released_xclip
import torch
from released_code import Sizes
from torch import Tensor

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.evaluator import Evaluation, Evaluator
from tvr_lightning.evaluation.normalization import Normalizer
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.extract.fingerprint import fingerprints
from tvr_lightning.extract.plan import ExtractSource
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.methods.clip4clip import mean_pooling_similarity
from tvr_lightning.store import StoreItem, StoreWriter

SUBJECTS = {
    "GARE": released_gare.SUBJECT,
    "TC-MGC": released_tcmgc.SUBJECT,
    "GAID": released_gaid.SUBJECT,
    "X-CLIP": released_xclip.SUBJECT,
}
RECIPES = {"GARE": "gare", "TC-MGC": "tcmgc", "GAID": "gaid", "X-CLIP": "xclip", "CLIP4Clip": "clip4clip"}
PUBLISHED = {
    "GARE": "6.9 s (Table 10)",
    "TC-MGC": "673 ms per video (Table 1)",
    "GAID": "6.5 s; 98.2 s without its own pooling (Table 6)",
    "X-CLIP": "none",
    "CLIP4Clip": "none",
}
UNSTORED = "--data.init_args.features=null"
Score = Callable[[TextFeatures, VideoFeatures], Scores]


def features(items: int, args: argparse.Namespace) -> tuple[TextFeatures, VideoFeatures]:
    """Return N texts and their N videos, with the dimension, words, and frames of the command line."""
    generator = torch.Generator().manual_seed(items)

    def near(center: Tensor, count: int) -> Tensor:
        return center.unsqueeze(1) + torch.randn(items, count, args.dimension, generator=generator)

    sentence = torch.randn(items, args.dimension, generator=generator)
    frames = near(0.25 * sentence, args.frames)
    text = TextFeatures(sentence, near(sentence, args.words), torch.ones(items, args.words, dtype=torch.bool))
    mask = torch.ones(items, args.frames, dtype=torch.bool)
    audio = near(0.25 * sentence, args.frames) if args.sound else None
    video = VideoFeatures(frames, mask, audio=audio, audio_mask=mask if args.sound else None)
    return text.to(args.device), video.to(args.device)


def score_of(method: str, form: str, args: argparse.Namespace) -> Score:
    """Return the scoring function of a method, in the given form if it has two."""
    if method == "CLIP4Clip":
        return lambda text, video: Scores(mean_pooling_similarity(text, video))
    subject = SUBJECTS[method]
    form = "factorized" if form == "-" else form
    head = subject.build(form, None, Sizes(args.dimension, args.words, args.frames)).to(args.device).eval()
    return lambda text, video: Scores(subject.score(head, text, video))


def evaluated(
    score: Score,
    given: tuple[TextFeatures, VideoFeatures],
    args: argparse.Namespace,
    normalizer: Normalizer | None = None,
) -> tuple[Evaluation, float, float]:
    """Return the table, and the wall-clock and CPU seconds."""
    (text, video), items = given, len(given[0])
    evaluator = Evaluator(score, memory_budget_bytes=int(args.budget * 2**30), device=torch.device(args.device))
    index, truth = torch.arange(items), GroundTruth(torch.arange(items), items, "Random", "test", "one text per video")
    if args.device != "cpu":
        torch.cuda.synchronize()
    wall, processor = time.perf_counter(), time.process_time()
    table = evaluator.evaluate(text, index, video, index, truth, normalizer)
    if args.device != "cpu":
        torch.cuda.synchronize()
    return table, time.perf_counter() - wall, time.process_time() - processor


def header(args: argparse.Namespace) -> None:
    machine = torch.cuda.get_device_name() if args.device != "cpu" else f"{platform.machine()}, {args.threads} threads"
    print(
        f"{date.today()}, {machine}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; D = {args.dimension}, "
        f"W = {args.words}, F = {args.frames}, float32, budget {args.budget:g} GiB\n"
    )


def methods(args: argparse.Namespace) -> None:
    """Time every method at N x N, dense and factorized."""
    header(args)
    evaluated(score_of("CLIP4Clip", "-", args), features(64, args), args)  # starts CUDA
    print("| method | items | form | seconds | CPU seconds | R@1 | value in the paper |")
    print("|---|---|---|---|---|---|---|")
    for items in args.items:
        for method in args.methods:
            args.sound = method == "GAID"
            dense = method != "CLIP4Clip" and SUBJECTS[method].dense_budgets
            for form in args.forms if dense else ("-",):
                table, wall, processor = evaluated(score_of(method, form, args), features(items, args), args)
                measured = f"{wall:.1f} | {processor:.1f} | {table.text_to_video['R@1']:.1f}"
                print(f"| {method} | {items} | {form} | {measured} | {PUBLISHED[method]} |", flush=True)


def two_stage(args: argparse.Namespace) -> None:
    """Rank only candidates, and also score all pairs if `--exhaustive` is given."""
    header(args)
    print("| method | items | candidates | seconds | CPU seconds | R@1 | R@10 | recall of the candidates |")
    print("|---|---|---|---|---|---|---|---|")
    for items in args.items:
        for method in args.methods:
            args.sound = method == "GAID"
            score, given = score_of(method, "factorized", args), features(items, args)
            for normalizer in (TwoStage(args.candidates), None) if args.exhaustive else (TwoStage(args.candidates),):
                table, wall, processor = evaluated(score, given, args, normalizer)
                held = [value for name, value in table.measured.items() if name.endswith("text-to-video")]
                t2v = table.text_to_video
                found = f"{t2v['R@1']:.2f} | {t2v['R@10']:.2f} | {f'{held[0]:.2f}' if held else '-'}"
                ranked = args.candidates if normalizer else "all"
                print(f"| {method} | {items} | {ranked} | {wall:.1f} | {processor:.1f} | {found} |", flush=True)


def memory(args: argparse.Namespace) -> None:
    """Run one process per number of items, and print the growth of its memory during ranking."""
    header(args)
    print("| items | N x M matrix, MiB | largest growth of memory, MiB | budget, MiB | seconds | CPU seconds |")
    print("|---|---|---|---|---|---|", flush=True)
    shared = [f"--{name}={getattr(args, name)}" for name in ("dimension", "frames", "threads", "budget", "device")]
    for items in args.items:
        subprocess.run([sys.executable, __file__, "grow", f"--items={items}", "--words=1", *shared], check=True)


def grow(args: argparse.Namespace) -> None:
    """Rank once with CLIP4Clip, and print a row of the table of `memory`."""
    (items,) = args.items
    score = score_of("CLIP4Clip", "-", args)
    evaluated(score, features(64, args), args)  # warm
    given = text, video = features(items, args)
    size = 4 * (text.sentence.numel() + text.words.numel() + video.frames.numel())
    gc.collect()
    if args.device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)
    before = largest_memory(args, reset=True)
    _, wall, processor = evaluated(score, given, args)
    growth = largest_memory(args) - before - size  # the copy in scoring order is not part of the budget
    print(
        f"| {items} | {4 * items * items / 2**20:.0f} | {max(growth, 0) / 2**20:.0f} | {1024 * args.budget:.0f} | "
        f"{wall:.1f} | {processor:.1f} |",
        flush=True,
    )


def whole(args: argparse.Namespace) -> None:
    """Time `tvr test` in separate processes, with ViT-B/32 and synthetic features of N pairs in the layout of 1k-A."""
    header(args)
    print("| method | items | seconds | CPU seconds |")
    print("|---|---|---|---|", flush=True)
    args.dimension, args.words, args.frames = 512, 32, 12
    for items in args.items:
        with tempfile.TemporaryDirectory() as folder:
            options = write_test(Path(folder), items, args)
            for method in args.methods:
                before, wall = os.times(), time.perf_counter()
                command = [sys.executable, "-m", "tvr_lightning.cli", "test", "--config", RECIPES[method], *options]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{method}: {done.stderr}")
                wall, after = time.perf_counter() - wall, os.times()
                spent = after.children_user + after.children_system - before.children_user - before.children_system
                print(f"| {method} | {items} | {wall:.1f} | {spent:.1f} |", flush=True)


def write_test(folder: Path, items: int, args: argparse.Namespace) -> list[str]:
    """Write 1k-A's test file with synthetic sentences, a random ViT-B/32, and a store; return the options for them."""
    import open_clip  # after the package, see tvr_lightning._torchvision

    root, weights = folder / "data", folder / "weights.pt"
    (root / "msrvtt" / "videos").mkdir(parents=True)
    rows = ["key,vid_key,video_id,sentence"]
    rows += [f"ret{i},msr{i},video{i},a synthetic sentence number {i}" for i in range(items)]
    (root / "msrvtt" / "MSRVTT_JSFUSION_test.csv").write_text("\n".join(rows) + "\n")
    annotations = {"videos": [{"video_id": "video0"}], "sentences": [{"video_id": "video0", "caption": "synthetic"}]}
    (root / "msrvtt" / "MSRVTT_data.json").write_text(json.dumps(annotations))
    (root / "msrvtt" / "MSRVTT_train.9k.csv").write_text("video_id\nvideo0\n")
    (root / "msrvtt" / "videos" / "video0.mp4").touch()  # must exist, but is not read
    torch.save(open_clip.create_model("ViT-B-32").state_dict(), weights)
    options = [
        "--config=heads",
        "--data.init_args.features=features",
        f"--data.init_args.root={root}",
        f"--model.init_args.encoder.init_args.weights={weights}",
    ]
    method, data = from_recipe(["recipes/clip4clip.yaml", "recipes/heads.yaml"], [*options[1:], UNSTORED])
    split = data.read_split("test")
    videos = [(video, StoreItem(data.directory, "test", video.video_id, str(video.path))) for video in split.videos]
    texts = [StoreItem.of_text(text.text, data.directory, "test") for text in split.texts]
    reader = data.video_reader(training=False)
    source = ExtractSource(videos, texts, reader, data.words)
    text, video = features(items, args)
    with StoreWriter.open(
        folder / "features", fingerprints(source, method.encoder, None, ["text", "frames"]), "-"
    ) as writer:
        sides = {"sentence": text.sentence, "words": text.words}
        writer.append("text", texts, sides, text.word_mask)
        writer.append("frames", [item for _, item in videos], {"frames": video.frames}, video.frame_mask)
    return options


def largest_memory(args: argparse.Namespace, reset: bool = False) -> int:
    """Return the peak memory of this process in bytes; if `reset`, reset it first and return the current memory."""
    if args.device != "cpu":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"methods": methods, "memory": memory, "two-stage": two_stage, "grow": grow, "whole": whole}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--items", type=int, nargs="+", default=[1000], help="N texts and N videos")
    parser.add_argument("--methods", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--frames", type=int, default=12)
    parser.add_argument("--forms", nargs="+", choices=("factorized", "dense"), default=["factorized", "dense"])
    parser.add_argument("--candidates", type=int, default=256)
    parser.add_argument("--exhaustive", action="store_true", help="two-stage: also score all pairs")
    parser.add_argument("--budget", type=float, default=2.0, help="evaluation.memory_gib")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.sound = False
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    parts[args.part](args)


if __name__ == "__main__":
    main()
