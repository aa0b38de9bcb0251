"""The unit of extraction: read a few videos, encode them; the same here and on the actors of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from tvr_lightning.data.batch import Media
from tvr_lightning.data.datasets import VideoReader
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.media.audio import AudioError
from tvr_lightning.media.video import VideoError
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


class Videos(Dataset[Any]):
    """The videos of a source; what cannot be read becomes a reason instead of a record.

    Args:
        records: of the videos.
        read: reads one video.
    """

    def __init__(self, records: list[VideoRecord], read: VideoReader) -> None:
        self.records = records
        self.read = read

    def __len__(self) -> int:
        """Return how many videos there are."""
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[int, Media | None, str]:
        """Return the place, and the media or the reason why there are none."""
        path = self.records[index].path
        try:
            media = self.read(self.records[index], None)
        except (VideoError, AudioError) as error:
            return index, None, str(error).removeprefix(f"{path}: ")
        except Exception as error:
            raise RuntimeError(f"{path}: {type(error).__name__}: {error}") from error
        if not isinstance(media, Media):
            raise StoreError(f"{path}: the data read features from a store; unset data.init_args.features to extract")
        return index, media, ""


Read = tuple[Media | None, list[int], list[tuple[int, str]], list[str]]
"""Media of the readable videos, their places, the others with the reason, and problems of the sound."""


def join(items: Sequence[tuple[int, Media | None, str]]) -> Read:
    """Join what `Videos` gives of a batch."""
    read = [(index, media) for index, media, _ in items if media is not None]
    failures = [(index, reason) for index, media, reason in items if media is None]
    media = type(read[0][1]).cat([media for _, media in read]) if read else None
    return media, [index for index, _ in read], failures, list(media.problems) if media is not None else []


def encode(
    read: Read, parts: Sequence[Part], encoder: Encoder, audio_encoder: AudioEncoder | None, device: str
) -> EncodedBatch:
    """Encode what was read of a batch.

    Args:
        read: as `join` gives it.
        parts: which features.
        encoder: of frames, on `device` and in eval mode.
        audio_encoder: of sound, where it is wanted.
        device: where the encoders are.
    """
    media, places, failed, problems = read
    found = EncodedBatch(places, {}, failed, problems)
    if media is None:
        return found
    media = media.to(device)
    if "frames" in parts or "patches" in parts:
        features = encoder.encode_video(media, patches="patches" in parts)
        found.features["frames"] = (features.frames.cpu(), features.frame_mask.cpu())
        if features.patches is not None:
            found.features["patches"] = (features.patches.cpu(), features.frame_mask.cpu())
    if "audio" in parts and audio_encoder is not None:
        audio, mask = audio_encoder.encode_audio(media)
        found.features["audio"] = (audio.cpu(), mask.cpu())
    return found
