"""Reading and encoding of a batch of videos, the same on this machine and on the actors of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tvr_lightning.data.batch import Media
from tvr_lightning.data.datasets import VideoReader
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.media.read_many import Unread
from tvr_lightning.store import Part, StoreError


@dataclass
class EncodedBatch:
    """Features of the readable videos of a batch.

    Attributes:
        read: Positions of the K readable videos among the records.
        features: Features (K, ...) and mask (K, F) of each part, on the CPU. Empty if no video could be read.
        failed: Position and reason for each of the other videos.
        problems: "path: reason" for each partly damaged audio track.
    """

    read: list[int] = field(default_factory=list)
    features: dict[Part, tuple[Tensor, Tensor]] = field(default_factory=dict)
    failed: list[tuple[int, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Item = tuple[int, VideoRecord]
"""A video with its position among those to extract."""


@dataclass(frozen=True)
class ReadMedia:
    """Reader for one video of a source.

    Attributes:
        read: Function that reads a clip.
    """

    read: VideoReader

    def __call__(self, item: Item) -> tuple[int, Media]:
        """Return the position and the media.

        Raises:
            VideoError, AudioError: The file cannot be read.
            StoreError: The data consists of stored features.
        """
        place, record = item
        media = self.read(record, None)
        if not isinstance(media, Media):
            hint = "To extract, unset data.init_args.features."
            raise StoreError(f"{record.path}: the data module reads features from a store. {hint}")
        return place, media


@dataclass
class MediaBatch:
    """Media of the readable videos of a batch.

    Attributes:
        media: Media of the K readable videos, or None if no video could be read.
        places: Positions of these videos.
        failed: Position and reason for each of the other videos.
    """

    media: Media | None
    places: list[int]
    failed: list[tuple[int, str]]


def join(items: Sequence[tuple[int, Media] | Unread[Item]]) -> MediaBatch:
    """Join the results of `ReadMedia` for a batch."""
    read = [item for item in items if not isinstance(item, Unread)]
    failed = [(item.item[0], item.reason) for item in items if isinstance(item, Unread)]
    media = Media.cat([media for _, media in read]) if read else None
    return MediaBatch(media, [place for place, _ in read], failed)


def encode(
    read: MediaBatch, parts: Sequence[Part], encoder: Encoder, audio_encoder: AudioEncoder | None, device: str
) -> EncodedBatch:
    """Encode the readable videos of a batch.

    Args:
        read: Batch returned by `join`.
        parts: Parts to compute.
        encoder: Frame encoder, on `device` and in eval mode.
        audio_encoder: Audio encoder, required for the part "audio".
        device: Device of the encoders.
    """
    found = EncodedBatch(read.places, {}, read.failed)
    if read.media is None:
        return found
    found.problems += read.media.problems
    media = read.media.to(device)
    if "frames" in parts or "patches" in parts:
        features = encoder.encode_video(media, patches="patches" in parts)
        found.features["frames"] = (features.frames.cpu(), features.frame_mask.cpu())
        if features.patches is not None:
            found.features["patches"] = (features.patches.cpu(), features.frame_mask.cpu())
    if "audio" in parts and audio_encoder is not None:
        audio, mask = audio_encoder.encode_audio(media)
        found.features["audio"] = (audio.cpu(), mask.cpu())
    return found
