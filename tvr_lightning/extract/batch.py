"""Reading and encoding of a batch of videos, the same on this machine and on the actors of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tvr_lightning.data.batch import Media
from tvr_lightning.data.records import VideoRecord
from tvr_lightning.encoders.audio import AudioEncoder
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.media.read_many import Unread
from tvr_lightning.store import Part


@dataclass
class ExtractBatch:
    """Videos of a batch, with media once they are read and with features once they are encoded.

    Attributes:
        read: Positions in the batch of the K readable videos.
        failed: Position in the batch and reason for each of the other videos.
        media: Media of the readable videos; None if there are none, or after encoding.
        features: Features (K, ...) and mask (K, F) of each part, on the CPU.
        problems: "path: reason" for each partly damaged audio track.
    """

    read: list[int]
    failed: list[tuple[int, str]]
    media: Media | None
    features: dict[Part, tuple[Tensor, Tensor]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def join(results: Sequence[Media | Unread[VideoRecord]]) -> ExtractBatch:
    """Join the media of the readable videos of a batch."""
    media = {place: result for place, result in enumerate(results) if not isinstance(result, Unread)}
    failed = [(place, result.reason) for place, result in enumerate(results) if isinstance(result, Unread)]
    return ExtractBatch([*media], failed, Media.cat([*media.values()]) if media else None)


def encode(
    batch: ExtractBatch, parts: Sequence[Part], encoder: Encoder, audio_encoder: AudioEncoder | None, device: str
) -> None:
    """Replace the media of a batch by the features of some parts, with encoders on `device` and in eval mode."""
    if batch.media is None:
        return
    media = batch.media.to(device)
    batch.problems += media.problems
    batch.media = None
    if "pixels" in parts:
        batch.features["pixels"] = (media.pixels.cpu(), media.frame_mask.cpu())
    if "frames" in parts or "patches" in parts:
        features = encoder.encode_video(media, patches="patches" in parts)
        batch.features["frames"] = (features.frames.cpu(), features.frame_mask.cpu())
        if features.patches is not None:
            batch.features["patches"] = (features.patches.cpu(), features.frame_mask.cpu())
    if "audio" in parts and audio_encoder is not None:
        audio, mask = audio_encoder.encode_audio(media)
        batch.features["audio"] = (audio.cpu(), mask.cpu())
