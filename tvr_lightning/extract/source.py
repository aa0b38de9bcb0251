"""Sources of features: a dataset, or any files and folders of videos."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tvr_lightning.data.audio_alignment import AudioOptions
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import SplitName, VideoRecord
from tvr_lightning.errors import MissingAssetError, UserError
from tvr_lightning.extract.plan import ExtractSource
from tvr_lightning.media.container import VIDEO_SUFFIXES
from tvr_lightning.media.preparation import Preparation
from tvr_lightning.option_types import FrameSampling
from tvr_lightning.store import StoreItem

FILES = "files"


def source_of_data(data: TextVideoDataModule, splits: Sequence[SplitName] = ("train", "val", "test")) -> ExtractSource:
    """Return the videos and texts of a dataset's splits, read as in evaluation.

    Raises:
        UserError: The data is read from a feature store, annotation files are missing, or the videos are copies, and
            some are incomplete or older than their originals.
    """
    reader = data.video_reader(training=False)
    if not isinstance(reader, MediaReader):
        raise UserError(
            "data.init_args.features or data.init_args.pixels names a feature store. Unset it to extract from the "
            "videos themselves."
        )
    data.check_present()
    videos: list[tuple[VideoRecord, StoreItem]] = []
    texts: list[StoreItem] = []
    for name in splits:
        split = data.read_split(name)
        if data.copies is not None:
            data.copies.check(video.path for video in split.videos if video.path.is_file())
        for video in split.videos:
            item = StoreItem(data.directory, split.name, video.video_id, str(video.path), video.span)
            videos.append((video, item))
        texts += [StoreItem.of_text(text.text, data.directory, split.name) for text in split.texts]
    copies = data.copies.how.describe() if data.copies is not None else ""
    return ExtractSource(videos, texts, dataclasses.replace(reader, on_corrupt="skip"), data.words, copies)


def source_of_files(
    paths: Sequence[str | Path],
    preparation: Preparation,
    frames: int = 12,
    sampling: FrameSampling = "one-fps-uniform",
    audio: AudioOptions | None = None,
) -> ExtractSource:
    """Return the videos in files and folders, searched recursively and sorted; their IDs are their paths as given."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise MissingAssetError(f"{path}: no such file or folder")
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in VIDEO_SUFFIXES and file.is_file())
        found += [path] if path.is_file() else inside
    if not found:
        listed = ", ".join(str(path) for path in paths) or "nothing"
        raise MissingAssetError(f"no videos in {listed}; supported suffixes: {' '.join(sorted(VIDEO_SUFFIXES))}")
    videos = [(VideoRecord(f.as_posix(), f), StoreItem(FILES, "", f.as_posix(), str(f))) for f in found]
    reader = MediaReader(frames, preparation, sampling, audio=audio, on_corrupt="skip")
    return ExtractSource(videos, [], reader)
