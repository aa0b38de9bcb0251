"""Options and source of an extraction."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.readers import MediaReader
from tvr_lightning.data.records import SplitName, VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count, ExtractEngine, FeaturePart, Options, StoreDtype, Workers
from tvr_lightning.store import PARTS, StoreItem


@dataclass
class ExtractOptions(Options):
    """Settings of an extraction, with the defaults of `tvr extract`, which documents them."""

    out: str
    what: Sequence[FeaturePart] = ()  # none means every part but pixels that the source and the encoders provide
    batch_size: Count = 32
    shard_size: Count = 256  # best a multiple of `batch_size`; if the process is killed, at most one shard is lost
    num_workers: Workers = 2
    dtype: StoreDtype = "float32"
    device: str = "cpu"
    command: str = "tvr extract"  # command line that repeats the extraction, for the messages of the store
    progress: bool = True
    engine: ExtractEngine = "local"
    actors: Count = 1
    address: str | None = None


@dataclass
class ExtractSource:
    """Videos and texts to extract, and how to read them."""

    videos: list[tuple[VideoRecord, StoreItem]]
    texts: list[StoreItem]
    read: MediaReader  # as in evaluation
    words: int = 32  # maximum number of tokens per text W
    copies: str = ""  # description of the copies of `tvr data compress` that `read` uses; empty for originals


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
    source = ExtractSource([], [], dataclasses.replace(reader, on_corrupt="skip"), data.words)
    for name in splits:
        split = data.read_split(name)
        if data.copies is not None:
            data.copies.check(video.path for video in split.videos if video.path.is_file())
            source.copies = data.copies.how.describe()
        for video in split.videos:
            item = StoreItem(data.directory, split.name, video.video_id, str(video.path), video.span)
            source.videos.append((video, item))
        source.texts += [StoreItem.of_text(text.text, data.directory, split.name) for text in split.texts]
    return source


def parts_of(
    what: Sequence[FeaturePart], source: ExtractSource, encoder: Encoder, audio_encoder: AudioEncoder | None
) -> list[FeaturePart]:
    """Return the parts to extract, in a fixed order.

    Raises:
        UserError: The source or the encoders cannot provide a part that was requested by name.
    """
    missing: dict[str, str] = {}
    if not encoder.gives_patches:
        missing["patches"] = f"{type(encoder).__name__} provides none"
    if audio_encoder is None or source.read.audio is None:
        missing["audio"] = (
            "there is no audio encoder, or the data has no audio. Set model.init_args.audio_encoder and "
            "data.init_args.audio."
        )
    for part in what:
        if part in missing:
            raise UserError(f"--parts {part}: {missing[part]}")
    # Pixels are not features and take the most space, so they are extracted only by name.
    wanted = what or {*PARTS} - {"pixels", *missing}
    return [part for part in PARTS if part in wanted]
