"""Speed of reading 12 frames of real clips, compared with simpler methods that return identical frames.

    TVR_TEST_DATA=... python benchmarks/decode.py --write benchmarks/results/decode.md
    TVR_TEST_DATA=... python benchmarks/decode.py --formats 2 --write benchmarks/results/decode-formats.md

The methods decode and convert every frame into one array and index it; do the same but keep only the wanted frames;
decode every frame and convert the wanted ones; seek to every wanted frame; or call `read_clip`. All use one decoding
thread and the same preprocessing of the wanted frames. The methods take turns on each clip, and the median of the
repeats counts. `--formats` compares the third method with the last one on clips of every container and codec, including
short clips. The page shows wall-clock and CPU times; only CPU times are valid on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Collection
from datetime import date
from pathlib import Path

import av
import numpy as np
from PIL import Image

import tvr_lightning  # noqa: F401  first, see tvr_lightning._torchvision
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.media.video import probe, read_clip

FRAMES, SIZE = 12, 224
CROP = Preparation(SIZE)
Images = list[np.ndarray]


def opened(path: Path) -> tuple[av.container.InputContainer, av.VideoStream]:
    container = av.open(str(path))
    stream = container.streams.video[0]
    stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
    return container, stream


def one_array(path: Path, positions: list[int], times: list[float]) -> Images:
    """Decode and convert every frame into one array, then index it."""
    container, stream = opened(path)
    with container:
        video = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    return [np.asarray(CROP(Image.fromarray(video[n]))) for n in positions]


def everything(path: Path, positions: list[int], times: list[float]) -> Images:
    """Decode and convert every frame, then keep the wanted ones."""
    container, stream = opened(path)
    with container:
        images = {n: image for n, image in enumerate(f.to_image() for f in container.decode(stream)) if n in positions}
    return [np.asarray(CROP(images[n])) for n in positions]


def convert_wanted(path: Path, positions: list[int], times: list[float]) -> Images:
    """Decode every frame, and convert only the wanted ones."""
    container, stream = opened(path)
    with container:
        images = {n: frame.to_image() for n, frame in enumerate(container.decode(stream)) if n in positions}
    return [np.asarray(CROP(images[n])) for n in positions]


def seek_each(path: Path, positions: list[int], times: list[float]) -> Images:
    """Seek to the keyframe before every wanted frame and decode up to it."""
    container, stream = opened(path)
    images = []
    with container:
        for moment in times:
            container.seek(round(moment / stream.time_base), backward=True, stream=stream)
            frame = next(f for f in container.decode(stream) if f.time >= moment - 1e-4)
            images.append(np.asarray(CROP(frame.to_image())))
    return images


def ours(path: Path, positions: list[int], times: list[float]) -> Images:
    """Read the wanted frames with `read_clip`."""
    clip = read_clip(path, frames=FRAMES, prepare=Preparation(SIZE))
    return [pixels.permute(1, 2, 0).numpy() for pixels, real in zip(clip.pixels, clip.frame_mask, strict=True) if real]


SEEK, PLAIN = "seek to every wanted frame", "decode every frame, convert the wanted ones"
WAYS: dict[str, Callable[[Path, list[int], list[float]], Images]] = {
    "decode and convert every frame into an array": one_array,
    "decode and convert every frame, keep the wanted ones": everything,
    PLAIN: convert_wanted,
    SEEK: seek_each,
    "read_clip": ours,
}


def wanted(path: Path) -> tuple[list[int], list[float]]:
    """Return the positions in presentation order, and the timestamps, of the frames that `read_clip` takes."""
    clip = read_clip(path, frames=FRAMES, prepare=Preparation(SIZE))
    container, stream = opened(path)
    with container:
        times = np.sort([frame.time for frame in container.decode(stream)])
    chosen = clip.timestamps[clip.frame_mask].numpy()
    positions = [int(np.abs(times - times[0] - t).argmin()) for t in chosen]
    return positions, [float(times[n]) for n in positions]


def measure(path: Path, repeats: int, names: Collection[str] = tuple(WAYS)) -> dict[str, tuple[float, float]]:
    """Return the median wall-clock and CPU seconds of each method on one clip; exit if their frames differ."""
    positions, times = wanted(path)
    ways = {name: WAYS[name] for name in names}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    expected: Images = []
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.perf_counter(), time.process_time()
            images = way(path, positions, times)
            seconds[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            expected = expected or images
            if len(images) != len(expected) or not all(map(np.array_equal, images, expected)):
                if name != SEEK:  # wrong timestamps mislead seeking
                    sys.exit(f"{path}: {name} returns different frames")
                print(f"{path.name}: {name} returns different frames", file=sys.stderr)
    return {name: tuple(np.median(values, axis=0)) for name, values in seconds.items()}


def head(title: str, command: str) -> list[str]:
    return [
        f"# {title}",
        "",
        f"`{command}`, {date.today().isoformat()}, {platform.machine()}, {cpu()}, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, PyAV {av.__version__}.",
    ]


def by_format(paths: list[Path], count: int) -> dict[str, list[Path]]:
    """Return the `count` shortest clips of every container and codec."""
    found: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda path: probe(path).duration):
        container, stream = opened(path)
        with container:
            found.setdefault(f"{path.suffix[1:]} | {stream.codec_context.name}", []).append(path)
    return {name: clips[:count] for name, clips in sorted(found.items())}


def report_formats(formats: dict[str, list[Path]], repeats: int, command: str) -> str:
    lines = [
        *head("Reading 12 frames of every format", command),
        f"One decoding thread, {SIZE} pixels, identical frames. The speedup is the CPU time of a plain loop ({PLAIN})",
        "divided by that of `read_clip`.",
        "",
        "| container | codec | clip | speedup |",
        "|---|---|---|---|",
    ]
    for name, paths in formats.items():
        for path in paths:
            seconds = measure(path, repeats, (PLAIN, "read_clip"))
            lines.append(f"| {name} | {path.name} | {seconds[PLAIN][1] / seconds['read_clip'][1]:.2f} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def report(results: dict[Path, dict[str, tuple[float, float]]], command: str) -> str:
    lines = [
        *head("Reading 12 frames of real clips", command),
        f"{len(results)} clips of 10 to 40 seconds, one decoding thread, {SIZE} pixels. All methods return identical"
        " frames. The script describes them.",
    ]
    for clock, kind in enumerate(("Wall-clock", "CPU")):
        lines += [
            "",
            f"{kind} time. Each speedup is the other method's time divided by this method's, as mean, minimum, and"
            " maximum over clips.",
            "",
            "| method | clips per second | speedup over the first | min. | max. | over the second | min. | max. |",
            "|---|---|---|---|---|---|---|---|",
        ]
        seconds = {name: np.array([r[name][clock] for r in results.values()]) for name in WAYS}
        first, second = list(seconds.values())[:2]
        for name, own in seconds.items():
            ratios = [f(base / own) for base in (first, second) for f in (np.mean, np.min, np.max)]
            cells = [f"{len(own) / own.sum():.2f}"] + [f"{ratio:.2f}" for ratio in ratios]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cpu() -> str:
    """Return the name of the CPU, if Linux provides it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=os.environ.get("TVR_TEST_DATA"), help="default: $TVR_TEST_DATA")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--formats", type=int, help="compare formats on up to N clips of each")
    parser.add_argument("--every", type=int, default=1, help="use every N-th clip")
    parser.add_argument("--write", type=Path, help="page to write")
    arguments = parser.parse_args()
    if arguments.root is None:
        parser.error("set TVR_TEST_DATA or give --root")
    root = Path(arguments.root)
    paths = sorted((root / "clips" / "videos").iterdir()) + sorted((root / "annotations").glob("*/videos/*"))
    command = f"python benchmarks/decode.py --repeats {arguments.repeats}"
    if arguments.formats:
        command += f" --formats {arguments.formats}"
        text = report_formats(by_format(paths, arguments.formats), arguments.repeats, command)
    else:
        command += f" --every {arguments.every}" if arguments.every > 1 else ""
        text = report(measured([path for path in paths if 10 <= probe(path).duration <= 40], arguments), command)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


def measured(paths: list[Path], arguments: argparse.Namespace) -> dict[Path, dict[str, tuple[float, float]]]:
    results = {}
    for path in paths[:: arguments.every]:
        results[path] = measure(path, arguments.repeats)
        own = results[path]["read_clip"]
        ratios = [base[clock] / own[clock] for clock in (0, 1) for base in list(results[path].values())[:2]]
        print(f"{path.name[:40]:40s}" + "".join(f"{ratio:8.2f}" for ratio in ratios), flush=True)
    return results


if __name__ == "__main__":
    main()
