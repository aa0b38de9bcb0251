"""Samples per second from raw video, from copies, from stored pixels and features, and from a naive loader.

    TVR_TEST_DATA=... python benchmarks/data.py --write benchmarks/results/data.md

Real clips, 12 frames of 224 pixels, ViT-B/32 and Whisper base with random weights (the weights do not affect the time).
All sources are read alternately by the same loader with the same batches, and the median over the rounds counts. The
naive loader decodes and converts every frame of a clip into one array, and indexes it. Raw video is only read to
pixels, while stored features also save the encoder. The script also measures the time of one sample by step (demuxing,
decoding, resizing, and tokenizing), and the speed of extraction with its bottleneck.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

import tvr_lightning  # noqa: F401  first, see tvr_lightning._torchvision
from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.batch import Media, VideoBatch
from tvr_lightning.data.datasets import VideoDataset
from tvr_lightning.data.readers import MediaReader, StoreReader, VideoReader
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.encoders import ClipEncoder, WhisperEncoder
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.extract.plan import ExtractOptions, ExtractSource
from tvr_lightning.extract.run import ExtractReport, extract
from tvr_lightning.media.compression import Compression, compress
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import read_clip
from tvr_lightning.media.workers import worker_context
from tvr_lightning.store import FeatureStore, StoreItem

FRAMES, SIZE, BATCH = 12, 224, 8
DATASET = "clips"
CROP = Preparation(SIZE)


@dataclass(frozen=True)
class NaiveReader:
    """A reader that decodes and converts every frame of a clip, then takes `FRAMES` of them."""

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media:
        with av.open(str(video.path)) as container:
            whole = np.stack(
                [frame.to_ndarray(format="rgb24") for frame in container.decode(container.streams.video[0])]
            )
        wanted = np.linspace(0, len(whole) - 1, FRAMES, dtype=int)
        images = np.stack([np.asarray(CROP(Image.fromarray(whole[n]))) for n in wanted])
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        return Media(pixels[None], torch.ones(1, FRAMES, dtype=torch.bool))

    def empty(self) -> Media:
        return Media(torch.zeros(0, FRAMES, 3, SIZE, SIZE, dtype=torch.uint8), torch.zeros(0, FRAMES, dtype=torch.bool))

    def absent(self, split: Split) -> dict[int, str]:
        return {}

    def text(self, text: str) -> list[str]:
        return [text]


def copies(split: Split, folder: Path) -> Split:
    """Compress the videos of a split as `tvr data compress` does."""
    videos = []
    for number, video in enumerate(split.videos):
        copy = folder / f"{number}.mp4"
        copy.write_bytes(compress(video.path, Compression(size=SIZE)).content)
        videos.append(VideoRecord(video.video_id, copy))
    return Split("test", "", videos, [])


def division(videos: list[Path], captions: list[str]) -> list[tuple[str, float]]:
    """Return the CPU milliseconds of each step for one sample, which is a clip and a caption."""
    tokenizer = ClipTokenizer(77)
    spent = dict.fromkeys(("demux", "decode and convert", "resize and crop", "tokenize"), 0.0)
    for path in videos:
        began = time.process_time()
        with av.open(str(path)) as container:
            for _ in container.demux(container.streams.video[0]):
                pass
        demuxed = time.process_time()
        clip = read_clip(path, frames=FRAMES, prepare=Preparation(SIZE))
        read = time.process_time()
        with av.open(str(path)) as container:
            image = next(container.decode(container.streams.video[0])).to_image()
        ready = time.process_time()
        for _ in range(int(clip.frame_mask.sum())):
            CROP(image)
        cropped = time.process_time() - ready
        spent["demux"] += demuxed - began
        spent["resize and crop"] += cropped
        spent["decode and convert"] += max(read - demuxed - cropped - (demuxed - began), 0.0)
    began = time.process_time()
    for caption in captions:
        tokenizer.encode([caption], 32)
    spent["tokenize"] = (time.process_time() - began) * len(videos) / len(captions)
    return [(name, 1000 * seconds / len(videos)) for name, seconds in spent.items()]


def pace(split: Split, read: VideoReader, workers: int, passes: int) -> float:
    """Return videos per second over several passes, after one that warms up the workers and the page cache."""
    loader = DataLoader(
        VideoDataset(split, read),
        batch_size=BATCH,
        collate_fn=VideoBatch.cat,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context=worker_context() if workers else None,
    )
    for _ in loader:
        pass
    began = time.perf_counter()
    for _ in range(passes):
        for _ in loader:
            pass
    return passes * len(split.videos) / (time.perf_counter() - began)


def extraction(source: ExtractSource, out: Path, what: list[str], workers: int) -> ExtractReport:
    """Extract parts with encoders of full size."""
    torch.manual_seed(0)
    clip, whisper = ClipEncoder("ViT-B-32", None), WhisperEncoder("base", None)
    options = ExtractOptions(str(out), what=what, batch_size=BATCH, num_workers=workers)  # type: ignore[arg-type]
    return extract(source, clip, whisper, options)


def table(rows: list[list[str]], header: list[str]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(report: ExtractReport) -> list[str]:
    """Return the videos per second, the share of each step in the total time, and the slowest step."""
    count = max(report.written.values())
    spent = [f"{report.spent[step] / report.seconds:.0%}" for step in ("waiting", "encoding", "writing")]
    return [f"{count / report.seconds:.2f}", *spent, max(report.spent, key=lambda step: report.spent[step])]


def main() -> None:
    """Measure and print, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clips", type=int, default=60, help="number of clips")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, in each of which every source is read")
    parser.add_argument("--num_workers", type=int, default=2, help="number of worker processes")
    parser.add_argument("--write", type=Path, help="page to write")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    videos = sorted((Path(os.environ["TVR_TEST_DATA"]) / "clips" / "videos").iterdir())[: options.clips]
    with tempfile.TemporaryDirectory() as folder:
        records = [VideoRecord(video.name, video) for video in videos]
        items = [StoreItem(DATASET, "test", video.name, str(video)) for video in videos]
        silent = MediaReader(FRAMES, CROP, "one-fps-uniform")
        heard = MediaReader(FRAMES, CROP, "one-fps-uniform", audio=AudioOptions("whisper"), on_corrupt="skip")
        source = ExtractSource(list(zip(records, items, strict=True)), [], heard)
        frames = extraction(source, Path(folder), ["frames"], options.num_workers)
        audio = extraction(source, Path(folder), ["audio"], options.num_workers)
        extraction(source, Path(folder), ["pixels"], options.num_workers)
        split = Split("test", "", records, [])
        store = FeatureStore(folder)
        stored, pixels = StoreReader(store, DATASET), StoreReader(FeatureStore(folder, ["pixels"]), DATASET, silent)
        copied = copies(split, Path(folder))
        naive = NaiveReader()
        ways: list[tuple[str, Split, VideoReader, int, int]] = [
            ("naive: decode and convert everything, 1 worker", split, naive, 1, 1),
            ("naive, 2 workers", split, naive, 2, 1),
            ("raw video, 1 worker", split, silent, 1, 1),
            ("raw video, 2 workers", split, silent, 2, 1),
            ("raw video and log-mel, 2 workers", split, source.read, 2, 1),
            ("copies (tvr data compress), 1 worker", copied, silent, 1, 3),
            ("stored pixels, 1 worker", split, pixels, 1, 20),
            ("stored features (frames and audio), 2 workers", split, stored, 2, 20),
        ]
        rounds = [[pace(own, read, workers, n) for _, own, read, workers, n in ways] for _ in range(options.rounds)]
        paces = [statistics.median(column) for column in zip(*rounds, strict=True)]
    rows = [
        [way[0], f"{p:.2f}", f"{p / paces[0]:.2f}", f"{p / paces[3]:.2f}"] for way, p in zip(ways, paces, strict=True)
    ]
    with (Path(os.environ["TVR_TEST_DATA"]) / "clips" / "captions.csv").open(encoding="utf-8", newline="") as file:
        captions = [row["caption1"] for row in csv.DictReader(file)]
    parts = division(videos, captions)
    whole = sum(milliseconds for _, milliseconds in parts)
    shares = [[name, f"{milliseconds:.2f}", f"{milliseconds / whole:.0%}"] for name, milliseconds in parts]
    extracted = [["frames, ViT-B/32", *share(frames)], ["audio, Whisper base", *share(audio)]]
    page = f"""# Reading training and evaluation samples

`python benchmarks/data.py {" ".join(sys.argv[1:])}`, {date.today()}, {platform.machine()}, {os.cpu_count()} cores,
load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}.
{len(videos)} real clips, {FRAMES} frames of {SIZE} pixels, batches of {BATCH}, rounds: {options.rounds}.

Videos per second of one loader, without an encoder:

{table(rows, ["source", "videos per second", "relative to naive, 1 worker", "relative to raw video, 2 workers"])}

CPU time of one sample by step, in one process:

{table(shares, ["step", "milliseconds", "share"])}

Extraction with {options.num_workers} workers, with shares of the total time:

{table(extracted, ["part", "videos per second", "waiting for decoding", "encoding", "writing", "bottleneck"])}

Videos per second depend on the load of the machine. The ratios are from one run in which the sources took turns.
"""
    print(page)
    if options.write:
        options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
