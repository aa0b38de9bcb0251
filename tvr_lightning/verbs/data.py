"""`tvr data`: datasets fetched, brought in, checked, counted and looked at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.data.check import check, print_report, write_report
from tvr_lightning.data.compress import compress_dataset
from tvr_lightning.data.show import show
from tvr_lightning.data.stats import print_stats, stats
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.importing.hub import fetch
from tvr_lightning.importing.run import import_dataset
from tvr_lightning.importing.videos import ImportFailed, Way
from tvr_lightning.media.compression import LEAST_SIZE, Compression, Frames, Like
from tvr_lightning.media.sampling import FrameSampling
from tvr_lightning.places import File, Folder, NewFile, NewFolder
from tvr_lightning.ranges import Count, Range
from tvr_lightning.recipe import data_from_recipe

Dataset = Literal["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]


def data_import(
    dataset: Dataset, from_: Folder, root: NewFolder | None = None, layout: str | None = None, videos: Way = "link"
) -> int:
    """Bring a dataset as you hold it into the layout that this package reads; deletes and overwrites nothing.

    Ends with status 1 where captions have no video.

    Args:
        dataset: which one.
        from_: folder with its annotations and its videos, these in folders or in zip and tar files.
        root: parent folder of all datasets; TVR_DATA by default.
        layout: in which it comes, where several could be: hub, clip4clip, official, hgr or tmass.
        videos: link or copy video files; what is in archives is unpacked.
    """
    parent = root or os.environ.get("TVR_DATA")
    if not parent:
        raise ImportFailed("neither --root nor the environment variable TVR_DATA says where datasets go; give one")
    done = import_dataset(dataset, from_, Path(parent), layout=layout, way=videos)
    for line in done.lines():
        print(line)
    return 1 if done.absent else 0


def data_get(dataset: Dataset, to: NewFolder | None = None, annotations_only: bool = False) -> int:
    """Fetch a dataset that somebody keeps openly on the Hugging Face hub; the same command goes on where it stopped.

    Args:
        dataset: which one: msrvtt, msvd, didemo or activitynet.
        to: folder for the files as they are there; hub-<dataset> by default.
        annotations_only: leave the videos out.
    """
    folder = to or Path(f"hub-{dataset}")
    files = fetch(dataset, folder, annotations_only)
    size = sum(file.stat().st_size for file in files) / 1e9
    print(f"{len(files)} files, {size:.2f} GB, are in {folder}; next: tvr data import {dataset} --from {folder}")
    return 0


def data_check(
    config: list[str],
    decode: bool = False,
    workers: Count | None = None,
    report: NewFile | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """List everything wrong with a dataset: files, captions, ids, splits; exit status 1 where anything must be mended.

    Args:
        config: recipe files or data overlays, later ones on top of earlier ones.
        decode: also decode every video.
        workers: processes that look at videos; by default one per core.
        report: where to write the report as JSON besides.
        overrides: options on top of the recipes, such as `--data.init_args.batch_size=32`.
    """
    found = check(data_from_recipe(config, overrides), decode=decode, workers=workers or os.cpu_count() or 1)
    print_report(found)
    if report is not None:
        write_report(found, report)
    return 1 if found.problems else 0


def data_compress(
    config: list[str],
    out: NewFolder,
    fps: Count = 3,
    size: Annotated[int, Range(at_least=LEAST_SIZE)] = 224,
    frames: Frames = "h264",
    like: Like | None = None,
    workers: Count | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Copy a dataset's videos small to train from them; the same command goes on, and makes anew what has changed.

    Ids, layout, sound and the whole picture are kept. Ends with status 1 where a video cannot be read.

    Args:
        config: recipe files or data overlays, later ones on top of earlier ones.
        out: folder for the copies; train on them with --data.init_args.root=FOLDER.
        fps: frames a second.
        size: pixels of the short side of a frame.
        frames: h264, or jpeg, which takes more room and is faster to read.
        like: Make CLIP4Clip's own copies: the frames and the size that its script's ffmpeg command gives.
        workers: processes that decode and encode; by default one per core.
        overrides: options on top of the recipes, such as `--data.init_args.root=FOLDER`.
    """
    data = data_from_recipe(config, overrides)
    how = Compression(fps, size, frames, "bicubic" if like else data.preparation.interpolation, like)
    done = compress_dataset(data, out, how, workers=workers or os.cpu_count() or 1)
    for line in done.lines():
        print(line)
    return 1 if done.unread else 0


def data_stats(config: list[str], workers: Count | None = None, overrides: Sequence[str] = ()) -> int:
    """Print videos, captions, caption lengths in tokens, durations, and the share of videos with sound.

    Args:
        config: recipe files or data overlays, later ones on top of earlier ones.
        workers: processes that look at videos; by default one per core.
        overrides: options on top of the recipes, such as `--data.init_args.batch_size=32`.
    """
    data = data_from_recipe(config, overrides)
    tokens = ClipTokenizer(context_length=max(data.words, 3)).needed
    print_stats(stats(data, tokens, workers=workers or os.cpu_count() or 1))
    return 0


def data_show(
    video: File, out: NewFile = Path("page.png"), frames: Count = 12, sampling: FrameSampling = "one-fps-uniform"
) -> int:
    """Draw the frames of a video, its waveform and its log-mel picture onto one page.

    Args:
        video: a media file.
        out: image to write; the suffix decides the format (.png, .pdf, .svg).
        frames: how many frames.
        sampling: which frames.
    """
    show(video, out, frames=frames, sampling=sampling)
    print(f"Wrote {out}")
    return 0
