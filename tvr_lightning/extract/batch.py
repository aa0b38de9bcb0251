"""The unit of extraction: read a few videos, encode them; the same here and on the actors of a cluster."""

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
    """Features of the videos of a batch that could be read.

    Attributes:
        read: places of the K readable videos among the records.
        features: by part, features (K, ...) and their mask (K, F), on the CPU; empty where nothing could be read.
        failed: place and reason of each of the others.
        problems: "path: reason" of sound tracks that are broken in places.
    """

    read: list[int] = field(default_factory=list)
    features: dict[Part, tuple[Tensor, Tensor]] = field(default_factory=dict)
    failed: list[tuple[int, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Item = tuple[int, VideoRecord]
"""A video by its place among those that are extracted."""


@dataclass(frozen=True)
class ReadMedia:
    """Reads one video of a source.

    Attributes:
        read: reads a clip.
    """

    read: VideoReader

    def __call__(self, item: Item) -> tuple[int, Media]:
        """Return the place and the media.

        Raises:
            VideoError, AudioError: the file cannot be read.
            StoreError: the data are features already.
        """
        place, record = item
        media = self.read(record, None)
        if not isinstance(media, Media):
            hint = "To extract, unset data.init_args.features."
            raise StoreError(f"{record.path}: the data module reads features from a store. {hint}")
        return place, media


@dataclass
class MediaBatch:
    """What was read of a batch.

    Attributes:
        media: of the K readable videos; None where none could be read.
        places: of these videos.
        failed: place and reason of each of the others.
    """

    media: Media | None
    places: list[int]
    failed: list[tuple[int, str]]


def join(items: Sequence[tuple[int, Media] | Unread[Item]]) -> MediaBatch:
    """Join what `ReadMedia` gives of a batch."""
    read = [item for item in items if not isinstance(item, Unread)]
    failed = [(item.item[0], item.reason) for item in items if isinstance(item, Unread)]
    media = Media.cat([media for _, media in read]) if read else None
    return MediaBatch(media, [place for place, _ in read], failed)


def encode(
    read: MediaBatch, parts: Sequence[Part], encoder: Encoder, audio_encoder: AudioEncoder | None, device: str
) -> EncodedBatch:
    """Encode what was read of a batch.

    Args:
        read: as `join` gives it.
        parts: which features.
        encoder: of frames, on `device` and in eval mode.
        audio_encoder: of sound, where it is wanted.
        device: where the encoders are.
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
