"""`tvr data ...`: datasets are generated, downloaded, imported, checked, compressed, counted, and viewed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tvr_lightning.cli.loading import loading
from tvr_lightning.cli.types import AtLeast8, AtLeast16, File, Folder, NewFile, NewFolder
from tvr_lightning.config.recipe_files import OptionError
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import CopiedFrames, CopiesLike, Count, DatasetName, FrameSampling

Downloadable = Literal["msrvtt", "msvd", "didemo", "activitynet"]
IMAGES = (".png", ".pdf", ".svg")


def synth(
    dataset: DatasetName,
    /,
    root: NewFolder = Path("fixture"),
    videos: AtLeast8 = 500,
    seed: int = 0,
    num_workers: Count | None = None,
) -> int:
    """Write a synthetic dataset of playable mp4 files in the layout of a real dataset.

    Args:
        dataset: dataset whose layout is used.
        root: parent folder, in which the dataset gets its own folder.
        videos: total number of videos; a fifth is the test split.
        seed: random seed; the same seed gives the same dataset.
        num_workers: number of processes that render; by default one per core.
    """
    from tvr_lightning.synthetic.generate import synthesize

    print(f"Wrote {synthesize(dataset, root, videos, seed, workers=num_workers or os.cpu_count() or 1)}")
    return 0


def import_(
    dataset: DatasetName,
    /,
    from_: Folder,
    root: NewFolder | None = None,
    layout: str | None = None,
    videos: Literal["link", "copy"] = "link",
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
    from tvr_lightning.data.importing.run import import_dataset

    parent = root or os.environ.get("TVR_DATA")
    if not parent:
        raise UserError("The folder for datasets is not set. Pass --root or set the environment variable TVR_DATA.")
    done = import_dataset(dataset, from_, Path(parent), layout=layout, way=videos)
    print("\n".join(done.lines()))
    return 1 if done.absent else 0


def download(dataset: Downloadable, /, out: NewFolder | None = None, annotations_only: bool = False) -> int:
    """Download a dataset that is openly available on the Hugging Face Hub; rerun the command to resume.

    Args:
        dataset: name of the dataset: msrvtt, msvd, didemo or activitynet.
        out: folder for the downloaded files; hub-<dataset> by default.
        annotations_only: download the annotations without the videos.
    """
    from tvr_lightning.data.importing.hub import fetch

    folder = out or Path(f"hub-{dataset}")
    files = fetch(dataset, folder, annotations_only)
    size = sum(file.stat().st_size for file in files) / 1e9
    print(f"{len(files)} files ({size:.2f} GB) are in {folder}. Next: tvr data import {dataset} --from {folder}")
    return 0


def check(
    config: list[str],
    decode: bool = False,
    num_workers: Count | None = None,
    report: NewFile | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """List all problems of a dataset: files, captions, IDs, and splits; the exit status is 1 if there are any.

    Args:
        config: recipe files or data overlays, can be repeated; later ones override earlier ones.
        decode: also decode every video.
        num_workers: number of processes that check videos; by default one per core.
        report: JSON file for the report, in addition to the printed one.
        overrides: options that override those of recipes.
    """
    with loading("data check"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.data import check as dataset_check

    data, workers = data_from_recipe(config, overrides), num_workers or os.cpu_count() or 1
    found = dataset_check.check(data, decode=decode, workers=workers)
    dataset_check.print_report(found)
    if report is not None:
        dataset_check.write_report(found, report)
    return 1 if found.problems else 0


def compress(
    config: list[str],
    out: NewFolder,
    fps: Count = 3,
    size: AtLeast16 = 224,
    frames: CopiedFrames = "h264",
    like: CopiesLike | None = None,
    num_workers: Count | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Write small copies of a dataset's videos for training; rerun the command to resume and to update changed videos.

    IDs, layout, audio, and the aspect ratio are kept. The exit status is 1 if a video cannot be read.

    Args:
        config: recipe files or data overlays, can be repeated; later ones override earlier ones.
        out: folder for the copies; train on them with --data.init_args.root=FOLDER.
        fps: frames per second.
        size: length of a frame's short side in pixels.
        frames: encoding of the frames: h264, or jpeg, which takes more disk space and is faster to read.
        like: clip4clip for copies as CLIP4Clip's script makes them (3 fps, 224 pixels, h264).
        num_workers: number of processes that decode and encode; by default one per core.
        overrides: options that override those of recipes.
    """
    with loading("data compress"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.data.compress import compress_dataset
        from tvr_lightning.media.compression import Compression

    data = data_from_recipe(config, overrides)
    how = Compression(fps, size, frames, "bicubic" if like else data.preparation.interpolation, like)
    done = compress_dataset(data, out, how, workers=num_workers or os.cpu_count() or 1)
    print("\n".join(done.lines()))
    return 1 if done.unread else 0


def stats(config: list[str], num_workers: Count | None = None, overrides: Sequence[str] = ()) -> int:
    """Print the numbers of videos and captions, caption lengths in tokens, durations, and the share with audio.

    Args:
        config: recipe files or data overlays, can be repeated; later ones override earlier ones.
        num_workers: number of processes that read videos; by default one per core.
        overrides: options that override those of recipes.
    """
    with loading("data stats"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.data.stats import print_stats
        from tvr_lightning.data.stats import stats as statistics_of
        from tvr_lightning.encoders.tokenizer import ClipTokenizer

    data = data_from_recipe(config, overrides)
    tokens = ClipTokenizer(context_length=max(data.words, 3)).needed
    print_stats(statistics_of(data, tokens, workers=num_workers or os.cpu_count() or 1))
    return 0


def show(
    video: File,
    /,
    out: NewFile = Path("page.png"),
    frames: Count = 12,
    sampling: FrameSampling = "one-fps-uniform",
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
    from tvr_lightning.data.preview import preview

    preview(video, out, frames=frames, sampling=sampling)
    print(f"Wrote {out}")
    return 0
