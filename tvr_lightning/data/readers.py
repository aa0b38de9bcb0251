"""Readers of one video or text: from media files, or from a feature store instead of an encoder or of decoding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from tvr_lightning.data.audio_alignment import AudioOptions, add_sound, no_audio
from tvr_lightning.data.batch import Media, Tokens
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.augment import Augmentation, draw_augmentation
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.preparation import FrameTransform, Preparation
from tvr_lightning.media.video import read_clip
from tvr_lightning.option_types import FrameSampling
from tvr_lightning.store import FeatureStore, Fingerprint, VideoKey


@dataclass(frozen=True)
class MediaReader:
    """Decoder of clips from video files.

    Attributes:
        frames: Number of frames F per clip; shorter clips are padded and masked.
        preparation: Conversion of a frame into the square input of the encoder.
        sampling: Rule for selecting the frames of a clip.
        augmentation: Augmentation sampled once per clip, for all its frames, only with a generator.
        audio: Settings of the audio encoder input; None reads no audio.
        on_corrupt: Handling of a broken audio track; "skip" uses the readable part and reports it in `problems`.
        tokenise: The encoder's `caption_tokens`; None leaves captions as strings.
    """

    frames: int
    preparation: Preparation
    sampling: FrameSampling
    augmentation: Augmentation = "none"
    audio: AudioOptions | None = None
    on_corrupt: Literal["error", "skip"] = "error"
    tokenise: Callable[[list[str]], Tokens] | None = None

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media:
        """Return Media with pixels (1, F, 3, S, S), frame_mask (1, F) and duration (1,) in seconds."""
        augment: FrameTransform = self.preparation
        if generator is not None:
            augment = draw_augmentation(self.augmentation, self.preparation, generator)
        clip = read_clip(
            video.path,
            frames=self.frames,
            image_size=self.preparation.image_size,
            sampling=self.sampling,
            span=video.span,
            generator=generator,
            augment=augment,
        )
        duration = torch.tensor([clip.duration], dtype=torch.float32)
        media = Media(pixels=clip.pixels[None], frame_mask=clip.frame_mask[None], duration=duration)
        if self.audio is not None:
            add_sound(media, video.path, video.span, clip, self.audio, self.on_corrupt)
        return media

    def empty(self) -> Media:
        """Return Media with pixels (0, F, 3, S, S)."""
        size, dtype = self.preparation.image_size, torch.uint8 if self.preparation.antialias else torch.float16
        return Media(
            pixels=torch.zeros(0, self.frames, 3, size, size, dtype=dtype),
            frame_mask=torch.zeros(0, self.frames, dtype=torch.bool),
            audio=None if self.audio is None else no_audio(self.audio, self.frames),
            duration=torch.zeros(0),
        )

    def absent(self, split: Split) -> dict[int, str]:
        """Return which videos have no file, by their index."""
        return {index: "no such file" for index, video in enumerate(split.videos) if not video.path.is_file()}

    def text(self, text: str) -> list[str] | Tokens:
        """Return the caption as token IDs, or unchanged if the encoder tokenizes it."""
        return [text] if self.tokenise is None else self.tokenise([text])


def frame_fingerprint(frames: int, preparation: Preparation, sampling: FrameSampling, copies: str = "") -> Fingerprint:
    """Return a description of the sampling and preparation of stored frames, and of `copies` if there are any."""
    sampled = f"{sampling}, {frames} frames" + (f", {copies}" if copies else "")
    return {"sampling": sampled, "preprocessing": preparation.describe()}


def text_fingerprint(words: int) -> Fingerprint:
    """Return a description of the truncation of stored texts; the encoder defines the tokens."""
    return {"sampling": f"{words} words"}


@dataclass(frozen=True)
class StoreReader:
    """Reader of one video or text from a feature store, which replaces `MediaReader`.

    Attributes:
        store: Feature store, of which the open parts are read.
        dataset: Folder name of the dataset, under which `tvr extract` stored its videos.
    """

    store: FeatureStore
    dataset: str

    def key(self, video: VideoRecord) -> VideoKey:
        """Return the key of a video's features."""
        return self.dataset, video.video_id, video.span

    def read_key(self, video: VideoRecord) -> VideoKey:
        """Return the key of a video, or raise VideoError if extraction skipped it."""
        reason = self.skipped(video)
        if reason is not None:
            raise VideoError(video.path, reason)
        return self.key(video)

    def skipped(self, video: VideoRecord) -> str | None:
        """Return the reason why extraction skipped a video, or None."""
        for part in self.store.parts:
            if part != "text" and self.key(video) in self.store.skipped(part):
                return f"skipped when features were extracted: {self.store.skipped(part)[self.key(video)]}"
        return None

    def absent(self, split: Split) -> dict[int, str]:
        """Check that the store is complete for a split, and return why extraction skipped videos, by their index."""
        videos = {self.key(video): video.path for video in split.videos}
        for part in self.store.parts:
            files = dict.fromkeys(text.text for text in split.texts) if part == "text" else videos
            self.store.require_items(part, files)
        reasons = ((index, self.skipped(video)) for index, video in enumerate(split.videos))
        return {index: reason for index, reason in reasons if reason is not None}


@dataclass(frozen=True)
class FeatureReader(StoreReader):
    """Reader of stored features, which replace the encoder."""

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> VideoFeatures:
        """Return features with frames (1, F, D)."""
        return self.store.video([self.read_key(video)], "patches" in self.store.parts)

    def empty(self) -> VideoFeatures:
        """Return features of zero videos with the other dimensions of the store."""
        return self.store.first_video("patches" in self.store.parts)[:0]

    def text(self, text: str) -> TextFeatures:
        """Return features of one text: sentence (1, D), words (1, W, D)."""
        return self.store.text([text])


@dataclass(frozen=True)
class PixelReader(StoreReader):
    """Reader of stored frames, which replace decoding.

    Attributes:
        media: Reader with the same sampling and preparation, which reads texts.
    """

    media: MediaReader

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media:
        """Return Media with pixels (1, F, 3, S, S)."""
        return Media(*self.store.read("pixels", [self.read_key(video)]))

    def empty(self) -> Media:
        """Return Media with pixels (0, F, 3, S, S)."""
        return replace(self.media.empty(), duration=None)

    def text(self, text: str) -> list[str] | Tokens:
        """Return the caption as token IDs, or unchanged if the encoder tokenizes it."""
        return self.media.text(text)


VideoReader = MediaReader | FeatureReader | PixelReader
