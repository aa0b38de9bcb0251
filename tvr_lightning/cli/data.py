"""`tvr data`: datasets fetched, brought in, checked, counted and looked at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.config.recipe import data_from_recipe
from tvr_lightning.config.recipe_files import OptionError
from tvr_lightning.data.check import check, print_report, write_report
from tvr_lightning.data.compress import compress_dataset
from tvr_lightning.data.importing.hub import fetch
from tvr_lightning.data.importing.run import import_dataset
from tvr_lightning.data.importing.videos import ImportFailed, Way
from tvr_lightning.data.preview import preview
from tvr_lightning.data.stats import print_stats, stats
from tvr_lightning.encoders.tokenizer import ClipTokenizer
from tvr_lightning.media.compression import LEAST_SIZE, Compression, Frames, Like
from tvr_lightning.media.sampling import FrameSampling
from tvr_lightning.places import File, Folder, NewFile, NewFolder
from tvr_lightning.ranges import Count, Range

IMAGES = (".png", ".pdf", ".svg")
Dataset = Literal["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]


def data_import(
    dataset: Dataset, from_: Folder, root: NewFolder | None = None, layout: str | None = None, videos: Way = "link"
) -> int:
    """Import a downloaded dataset into the layout that this package reads, without deleting or overwriting files.

    The exit status is 1 if captions have no video.

    Args:
        dataset: name of the dataset.
        from_: folder with its annotations and its videos; videos can be in subfolders or in zip and tar files.
        root: parent folder of the datasets; $TVR_DATA by default.
        layout: layout of the downloaded files, if several fit: hub, clip4clip, official, hgr or tmass, depending on the
            dataset.
        videos: link (keep the source folder) or copy the video files; archives are always unpacked.
    """
    parent = root or os.environ.get("TVR_DATA")
    if not parent:
        raise ImportFailed("The folder for datasets is not set. Pass --root or set the environment variable TVR_DATA.")
    done = import_dataset(dataset, from_, Path(parent), layout=layout, way=videos)
    for line in done.lines():
        print(line)
    return 1 if done.absent else 0


def data_download(dataset: Dataset, out: NewFolder | None = None, annotations_only: bool = False) -> int:
    """Download a dataset that is openly available on the Hugging Face Hub; rerun the command to resume.

    Args:
        dataset: name of the dataset: msrvtt, msvd, didemo or activitynet.
        out: folder for the downloaded files; hub-<dataset> by default.
        annotations_only: download the annotations without the videos.
    """
    folder = out or Path(f"hub-{dataset}")
    files = fetch(dataset, folder, annotations_only)
    size = sum(file.stat().st_size for file in files) / 1e9
    print(f"{len(files)} files ({size:.2f} GB) are in {folder}. Next: tvr data import {dataset} --from {folder}")
    return 0


def data_check(
    config: list[str],
    decode: bool = False,
    num_workers: Count | None = None,
    report: NewFile | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """List all problems of a dataset: files, captions, IDs, and splits; the exit status is 1 if there are any.

    Args:
        config: recipe files or data overlays; later ones override earlier ones.
        decode: also decode every video.
        num_workers: number of processes that check videos; by default one per core.
        report: JSON file for the report, in addition to the printed one.
        overrides: options that override the recipes, such as `--data.init_args.batch_size=32`.
    """
    found = check(data_from_recipe(config, overrides), decode=decode, workers=num_workers or os.cpu_count() or 1)
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
    num_workers: Count | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Write small copies of a dataset's videos for training; rerun the command to resume and to update changed videos.

    IDs, layout, audio, and the aspect ratio are kept. The exit status is 1 if a video cannot be read.

    Args:
        config: recipe files or data overlays; later ones override earlier ones.
        out: folder for the copies; train on them with --data.init_args.root=FOLDER.
        fps: frames per second.
        size: length of a frame's short side in pixels.
        frames: encoding of the frames: h264, or jpeg, which takes more disk space and is faster to read.
        like: clip4clip for copies as CLIP4Clip's script makes them (3 fps, 224 pixels, h264).
        num_workers: number of processes that decode and encode; by default one per core.
        overrides: options that override the recipes, such as `--data.init_args.root=FOLDER`.
    """
    data = data_from_recipe(config, overrides)
    how = Compression(fps, size, frames, "bicubic" if like else data.preparation.interpolation, like)
    done = compress_dataset(data, out, how, workers=num_workers or os.cpu_count() or 1)
    for line in done.lines():
        print(line)
    return 1 if done.unread else 0


def data_stats(config: list[str], num_workers: Count | None = None, overrides: Sequence[str] = ()) -> int:
    """Print the numbers of videos and captions, caption lengths in tokens, durations, and the share with audio.

    Args:
        config: recipe files or data overlays; later ones override earlier ones.
        num_workers: number of processes that read videos; by default one per core.
        overrides: options that override the recipes, such as `--data.init_args.batch_size=32`.
    """
    data = data_from_recipe(config, overrides)
    tokens = ClipTokenizer(context_length=max(data.words, 3)).needed
    print_stats(stats(data, tokens, workers=num_workers or os.cpu_count() or 1))
    return 0


def data_show(
    video: File, out: NewFile = Path("page.png"), frames: Count = 12, sampling: FrameSampling = "one-fps-uniform"
) -> int:
    """Draw the frames of a video, its waveform, and its log-mel spectrogram on one page.

    Args:
        video: media file.
        out: image to write; the suffix sets the format (.png, .pdf, .svg).
        frames: number of frames.
        sampling: rule for selecting the frames.
    """
    if out.suffix.lower() not in IMAGES:
        raise OptionError(f"--out {out} must end in {', '.join(IMAGES[:-1])} or {IMAGES[-1]}")
    preview(video, out, frames=frames, sampling=sampling)
    print(f"Wrote {out}")
    return 0
