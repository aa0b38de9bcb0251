"""`tvr data ...`: datasets are generated, downloaded, imported, checked, compressed, counted, and viewed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tvr_lightning.cli.options import CORES, Config, File, Folder, NewFile, NewFolder, Processes
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import CopiesLike, Count, DatasetName, FrameSampling, Range
from tvr_lightning.runs.log import loading


def synth(
    dataset: Annotated[DatasetName, "dataset whose layout is used"],
    /,
    root: Annotated[NewFolder, "parent folder, in which the dataset gets its own folder"] = Path("fixture"),
    videos: Annotated[int, Range(at_least=8), "total number of videos; a fifth is the test split"] = 500,
    seed: Annotated[int, "random seed; the same seed gives the same dataset"] = 0,
    num_workers: Processes = CORES,
) -> None:
    """Write a synthetic dataset of playable mp4 files in the layout of a real dataset."""
    from tvr_lightning.synthetic.generate import synthesize

    print(f"Wrote {synthesize(dataset, root, videos, seed, workers=num_workers)}")


def import_(
    dataset: Annotated[DatasetName, "name of the dataset"],
    /,
    from_: Annotated[Folder, "folder with annotations and videos, which can be in subfolders or in zip and tar files"],
    root: Annotated[NewFolder | None, "parent folder of the datasets; $TVR_DATA by default"] = None,
    layout: Annotated[str | None, "hub, clip4clip, official, hgr, or tmass, if several layouts fit the files"] = None,
    videos: Annotated[Literal["link", "copy"], "link or copy the videos; archives are always unpacked"] = "link",
) -> int:
    """Import a downloaded dataset into the layout that this package reads.

    No files are deleted or overwritten. The exit status is 1 if captions have no video.
    """
    from tvr_lightning.data.importing.run import import_dataset

    parent = root or os.environ.get("TVR_DATA")
    if not parent:
        raise UserError("The folder for datasets is not set. Pass --root or set the environment variable TVR_DATA.")
    done = import_dataset(dataset, from_, Path(parent), layout=layout, way=videos)
    print("\n".join(done.lines()))
    return 1 if done.absent else 0


def download(
    dataset: Annotated[Literal["msrvtt", "msvd", "didemo", "activitynet"], "name of the dataset"],
    /,
    out: Annotated[NewFolder | None, "folder for the downloaded files; hub-<dataset> by default"] = None,
    annotations_only: Annotated[bool, "download the annotations without the videos"] = False,
) -> None:
    """Download a dataset that is openly available on the Hugging Face Hub; rerun the command to resume."""
    from tvr_lightning.data.importing.hub import fetch

    folder = out or Path(f"hub-{dataset}")
    files = fetch(dataset, folder, annotations_only)
    size = sum(file.stat().st_size for file in files) / 1e9
    print(f"{len(files)} files ({size:.2f} GB) are in {folder}. Next: tvr data import {dataset} --from {folder}")


def check(
    config: Config,
    decode: Annotated[bool, "also decode every video"] = False,
    num_workers: Processes = CORES,
    report: Annotated[NewFile | None, "JSON file for the report, in addition to the printed one"] = None,
    overrides: Sequence[str] = (),
) -> int:
    """List all problems of a dataset's files, captions, IDs, and splits; exit status 1 if there are any."""
    with loading("data check"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.data import check as dataset_check

    found = dataset_check.check(data_from_recipe(config, overrides), decode=decode, workers=num_workers)
    dataset_check.print_report(found)
    if report is not None:
        dataset_check.write_report(found, report)
    return 1 if found.problems else 0


def compress(
    config: Config,
    out: Annotated[NewFolder, "folder for the copies; train on them with --data.init_args.root=FOLDER"],
    fps: Annotated[Count, "frames per second"] = 3,
    size: Annotated[int, Range(at_least=16), "length of a frame's short side in pixels"] = 224,
    like: Annotated[CopiesLike | None, "copies as CLIP4Clip's script makes them (3 fps, 224 pixels)"] = None,
    num_workers: Processes = CORES,
    overrides: Sequence[str] = (),
) -> int:
    """Write small copies of a dataset's videos for training; rerun the command to resume or update.

    IDs, layout, audio, and the aspect ratio are kept. The exit status is 1 if a video cannot be read.
    """
    with loading("data compress"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.data.compress import compress_dataset
        from tvr_lightning.media.compression import Compression

    data = data_from_recipe(config, overrides)
    how = Compression(fps, size, "bicubic" if like else data.preparation.interpolation, like)
    done = compress_dataset(data, out, how, workers=num_workers)
    print("\n".join(done.lines()))
    return 1 if done.unread else 0


def stats(config: Config, num_workers: Processes = CORES, overrides: Sequence[str] = ()) -> None:
    """Print numbers of videos and captions, caption lengths in tokens, durations, and the share with audio."""
    with loading("data stats"):
        from tvr_lightning.config.recipe import data_from_recipe
        from tvr_lightning.data.stats import print_stats
        from tvr_lightning.data.stats import stats as statistics_of
        from tvr_lightning.encoders.tokenizer import ClipTokenizer

    data = data_from_recipe(config, overrides)
    tokens = ClipTokenizer(context_length=max(data.words, 3)).needed
    print_stats(statistics_of(data, tokens, workers=num_workers))


def show(
    video: Annotated[File, "media file"],
    /,
    out: Annotated[NewFile, "image to write; the suffix sets the format (.png, .pdf, .svg)"] = Path("page.png"),
    frames: Annotated[Count, "number of frames"] = 12,
    sampling: Annotated[FrameSampling, "rule for selecting the frames"] = "one-fps-uniform",
) -> None:
    """Draw the frames of a video, its waveform, and its log-mel spectrogram on one page."""
    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"--out {out} must end in .png, .pdf, or .svg")
    from tvr_lightning.data.preview import preview

    preview(video, out, frames=frames, sampling=sampling)
    print(f"Wrote {out}")
