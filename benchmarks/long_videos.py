"""Search for single moments in two-hour videos: how often they are found, and the cost of indexing.

The long videos are concatenated clips: real ones, re-encoded with the same settings and repeated to the full length,
and those of a synthetic dataset (`tvr data synth msrvtt --videos 960 --seed 3`). Every caption of the synthetic video
is a query, and a hit is a first moment within ten seconds of its clip. Peak memory is that of a process that indexes
the video, compared with one that indexes its first ten minutes. Videos, measurements, and query results stay in the
work folder, so that an interrupted run resumes.

Command: python benchmarks/long_videos.py --ckpt_path CHECKPOINT --synthetic FOLDER --clips FOLDER --work FOLDER
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TypeVar

import av

from tvr_lightning.media.container import VIDEO_SUFFIXES

Span = tuple[float, float]
T = TypeVar("T")
WIDTH, HEIGHT, RATE = 320, 240, 4
TOLERANCE = 10.0
"""Seconds before and after the right clip that still count as a hit."""

INDEX = """
import resource, sys, time
import torch
torch.set_num_threads(1)
from tvr_lightning.search.indexing import index
from tvr_lightning.search.scorer import ScorerSource
from tvr_lightning.search.segments import Segments
video, out, checkpoint, kind, length = sys.argv[1:]
began = time.process_time()
index([video], out, [ScorerSource(checkpoint)], progress=False, segments=Segments(kind, float(length)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time() - began)
"""


def resampled_frames(path: Path, size: tuple[int, int], rate: int) -> Iterator[av.VideoFrame]:
    """Yield the frames of a clip at a constant rate and size."""
    with av.open(str(path)) as container:
        following = 0.0
        for frame in container.decode(video=0):
            # Read before encoding, which changes the time of a frame that needs no resizing and is not copied.
            time = frame.time
            while time is not None and time >= following:
                yield frame.reformat(*size, "yuv420p")
                following += 1 / rate


def concatenate(clips: list[Path], path: Path, size: tuple[int, int], rate: int, seconds: float) -> list[Span]:
    """Concatenate clips, and repeat them until the length is reached.

    Each clip is encoded once and starts with a keyframe. Repetitions copy its packets.

    Returns:
        Start and end of every clip in the first round.
    """
    spans: list[Span] = []
    with av.open(str(path.with_suffix(".h264")), "w", format="h264") as container:
        stream = container.add_stream(
            "libx264", rate=rate, options={"preset": "ultrafast", "bf": "0", "x264-params": "repeat-headers=1"}
        )
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        number = 0
        for clip in clips:
            first = number
            for frame in resampled_frames(clip, size, rate):
                frame.pts, frame.time_base = number, Fraction(1, rate)
                frame.pict_type = av.video.frame.PictureType.I if number == first else av.video.frame.PictureType.NONE
                for packet in stream.encode(frame):
                    container.mux(packet)
                number += 1
            spans.append((first / rate, number / rate))
        for packet in stream.encode():
            container.mux(packet)
    rounds = -(-int(seconds * rate) // number)
    with av.open(str(path), "w") as container:
        out = None
        for turn in range(rounds):
            with av.open(str(path.with_suffix(".h264"))) as source:
                stream = source.streams.video[0]
                out = out or container.add_stream_from_template(stream)
                position = 0
                for packet in source.demux(stream):
                    if packet.size == 0:
                        continue
                    packet.stream, packet.time_base = out, Fraction(1, rate)
                    packet.pts = packet.dts = turn * number + position
                    packet.duration = 1
                    container.mux(packet)
                    position += 1
    path.with_suffix(".h264").unlink()
    return spans


def joined(clips: list[Path], path: Path, rate: int) -> list[Span]:
    """Concatenate clips with equal encoder settings by copying packets; return the start and end of each."""
    spans: list[Span] = []
    start = 0
    with av.open(str(path), "w") as container:
        out = None
        for clip in clips:
            with av.open(str(clip)) as source:
                stream = source.streams.video[0]
                out = out or container.add_stream_from_template(stream)
                count = 0
                for packet in source.demux(stream):
                    if packet.size == 0:
                        continue
                    base, shift = packet.time_base, round(start / rate / packet.time_base)
                    packet.stream, packet.time_base = out, base
                    packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                    container.mux(packet)
                    count += 1
            spans.append((start / rate, (start + count) / rate))
            start += count
    return spans


def first_minutes(path: Path, seconds: float) -> Path:
    """Copy the packets of the beginning of a video to a new file, and return its path."""
    short = path.with_name(f"short-{path.name}")
    with av.open(str(path)) as source, av.open(str(short), "w") as container:
        stream = source.streams.video[0]
        out = container.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is None or packet.pts * packet.time_base > seconds:
                break
            packet.stream = out
            container.mux(packet)
    return short


def kept(path: Path, make: Callable[[], T]) -> T:
    """Return a stored result, or compute it and store it as JSON."""
    if not path.is_file():
        made = make()
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(made))
        draft.replace(path)
    return json.loads(path.read_text())


def indexed(video: Path, out: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Index a video in a separate process; return peak memory in MiB and CPU seconds."""
    shutil.rmtree(out, ignore_errors=True)  # remove the results of an interrupted run
    words = [str(video), str(out), str(arguments.ckpt_path), arguments.segments, str(arguments.length)]
    printed = subprocess.run([sys.executable, "-c", INDEX, *words], capture_output=True, text=True, check=True).stdout
    peak, took = map(float, printed.split()[-2:])
    return peak / 1024, took


def hits(out: Path, queries: list[tuple[str, Span]], seconds: float, rerank: str | None) -> tuple[int, float]:
    """Return the number of hits, and the number expected for random moments."""
    from tvr_lightning.search.engine import Searcher
    from tvr_lightning.search.query import SearchQuery

    right, chance = 0, 0.0
    with Searcher(out) as searcher:
        known: dict[str, float] = {}
        for caption, (start, end) in queries:
            if caption not in known:
                few = 16 if rerank == "none" else 256  # the order of the vectors does not depend on it
                query = SearchQuery(query=caption, top=1, rerank=rerank, candidates=few)
                known[caption] = searcher.search(query).results[0].start
            moment = known[caption]
            low, high = max(start - TOLERANCE, 0.0), min(end + TOLERANCE, seconds)
            right += low <= moment <= high
            chance += (high - low) / seconds
    return right, chance


def captions_of(folder: Path, clips: list[Path]) -> dict[str, list[str]]:
    content = json.loads((folder / "msrvtt" / "MSRVTT_data.json").read_text())
    found: dict[str, list[str]] = {clip.stem: [] for clip in clips}
    for sentence in content["sentences"]:
        found[sentence["video_id"]].append(sentence["caption"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="the demo's checkpoint")
    parser.add_argument("--synthetic", type=Path, help="folder of a synthetic msrvtt dataset")
    parser.add_argument("--clips", type=Path, help="folder of real clips")
    parser.add_argument("--work", type=Path, required=True, help="folder for videos and indexes")
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--short", type=float, default=600.0)
    parser.add_argument("--segments", default="shots")
    parser.add_argument("--rerank", help="scorer of the second stage; none: rank by the vectors only")
    parser.add_argument("--length", type=float, default=20.0)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    day, cut = time.strftime("%Y-%m-%d"), f"{arguments.segments} of at most {arguments.length:g} s"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {day}; {cut}; ranked by {arguments.rerank or 'the method'}\n")
    heads = ["video", "seconds", "file", "peak memory", "peak memory, first 10 min", "ratio"]
    heads += ["indexing, CPU s", "queries", "hits", "hits by chance", "hits / chance"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    folder = (arguments.synthetic or Path()) / "msrvtt" / "videos"
    synthetic = sorted(folder.glob("*.mp4"), key=lambda path: path.stem.zfill(20)) if arguments.synthetic else []
    random.Random(0).shuffle(synthetic)
    found = sorted(arguments.clips.rglob("*")) if arguments.clips else []
    real = [path for path in found if path.suffix.lower() in VIDEO_SUFFIXES]
    for name, clips, size, rate in (("synthetic", synthetic, (112, 96), 10), ("real", real, (WIDTH, HEIGHT), RATE)):
        if not clips:
            continue
        path, of = arguments.work / f"{name}.mp4", functools.partial
        write = of(joined, clips, path, rate)
        if name == "real":
            write = of(concatenate, clips, path, size, rate, arguments.seconds)
        spans = kept(arguments.work / f"{name}-spans.json", write)
        with av.open(str(path)) as container:
            seconds = float(container.duration / av.time_base)
        out = arguments.work / f"{name}-index"
        peak, took = kept(arguments.work / f"{name}-memory.json", of(indexed, path, out, arguments))
        short, short_index = first_minutes(path, arguments.short), arguments.work / f"{name}-short-index"
        less, _ = kept(arguments.work / f"{name}-short-memory.json", of(indexed, short, short_index, arguments))
        cells = [f"{name}, {len(clips)} clips", f"{seconds:.0f}", f"{path.stat().st_size / 2**20:.0f} MiB"]
        cells += [f"{peak:.0f} MiB", f"{less:.0f} MiB", f"{peak / less:.3f}", f"{took:.0f}"]
        if name == "synthetic":
            said = captions_of(arguments.synthetic, clips)
            asked = [(text, span) for clip, span in zip(clips, spans, strict=True) for text in said[clip.stem]]
            right, chance = kept(arguments.work / f"{name}-hits.json", of(hits, out, asked, seconds, arguments.rerank))
            cells += [f"{len(asked):,}", f"{100 * right / len(asked):.1f} %", f"{100 * chance / len(asked):.2f} %"]
            cells += [f"{right / chance:.1f}"]
        else:
            cells += [""] * 4
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"Peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
