"""Readers of one video or text: from media files, or from a feature store instead of an encoder or of decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tvr_lightning.data.audio_alignment import AudioOptions, clip_media, no_audio
from tvr_lightning.data.batch import Media, Tokens
from tvr_lightning.data.records import Split, VideoRecord
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.augment import Augmentation, draw_augmentation
from tvr_lightning.media.clip_file import ClipFile
from tvr_lightning.media.container import MediaError, VideoError
from tvr_lightning.media.preparation import FrameTransform, Preparation
from tvr_lightning.media.read_many import attempt
from tvr_lightning.media.video import read_clip
from tvr_lightning.option_types import FrameSampling
from tvr_lightning.store import FeatureStore, Fingerprint, VideoKey


@dataclass(frozen=True)
class MediaReader:
    """Decoder of clips (1, F, 3, S, S) from video files, with the options of `TextVideoDataModule`.

    Augmentation is sampled once per clip, for all its frames, only with a generator. With `on_corrupt` skip, the
    readable part of a broken audio track is used and reported in `problems`. `tokenize` is the encoder's
    `caption_tokens`; None leaves captions as strings.
    """

    frames: int
    preparation: Preparation
    sampling: FrameSampling
    augmentation: Augmentation = "none"
    audio: AudioOptions | None = None
    on_corrupt: Literal["error", "skip"] = "error"
    tokenize: Callable[[list[str]], Tokens] | None = None

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media:
        """Return Media of one clip: pixels (1, F, 3, S, S) or one (K, 3, H, W), frame_mask (1, F)."""
        if self.preparation.resize_mode == "undecoded":
            mask = torch.ones(1, self.frames, dtype=torch.bool)
            return Media([ClipFile(video.path, video.span)], mask, times=torch.zeros(1, self.frames))
        clip = read_clip(video.path, self.frames, self._transform(generator), self.sampling, video.span, generator)
        return clip_media(clip, video.path, video.span, self.audio, self.on_corrupt, self.preparation.is_square)

    def _transform(self, generator: np.random.Generator | None) -> FrameTransform:
        if generator is None:
            return self.preparation
        return draw_augmentation(self.augmentation, self.preparation, generator)

    def augmented(self, pixels: Tensor, generator: np.random.Generator | None) -> Tensor:
        """Return prepared frames (1, F, 3, H, W) after the augmentation, which here follows the resizing."""
        if generator is None or self.augmentation == "none":
            return pixels
        change = self._transform(generator)
        frames = pixels[0].permute(0, 2, 3, 1).round().byte().numpy()
        changed = np.stack([change(Image.fromarray(frame)) for frame in frames])
        return torch.from_numpy(changed).permute(0, 3, 1, 2).unsqueeze(0).to(pixels.dtype)

    def empty(self) -> Media:
        """Return Media with pixels (0, F, 3, S, S)."""
        size = self.preparation.image_size
        dtype = torch.uint8 if self.preparation.antialias else torch.float16
        is_square = self.preparation.is_square
        return Media(
            pixels=torch.zeros(0, self.frames, 3, size, size, dtype=dtype) if is_square else [],
            frame_mask=torch.zeros(0, self.frames, dtype=torch.bool),
            times=None if is_square else torch.zeros(0, self.frames),
            audio=None if self.audio is None else no_audio(self.audio, self.frames),
        )

    def absent(self, split: Split) -> dict[int, str]:
        """Return which videos have no file, by their index."""
        return {index: "no such file" for index, video in enumerate(split.videos) if not video.path.is_file()}

    def text(self, text: str) -> list[str] | Tokens:
        """Return the caption as token IDs, or unchanged if the encoder tokenizes it."""
        return [text] if self.tokenize is None else self.tokenize([text])


def frame_fingerprint(frames: int, preparation: Preparation, sampling: FrameSampling, copies: str = "") -> Fingerprint:
    """Return a description of the sampling and preparation of stored frames, and of `copies` if there are any."""
    sampled = f"{sampling}, {frames} frames" + (f", {copies}" if copies else "")
    return {"sampling": sampled, "preprocessing": preparation.describe()}


def text_fingerprint(words: int) -> Fingerprint:
    """Return a description of the truncation of stored texts; the encoder defines the tokens."""
    return {"sampling": f"{words} words"}


@dataclass(frozen=True)
class StoreReader:
    """Reader of one video or text from a feature store: of features, which replace the encoder, or of frames.

    `tvr extract` stored the videos under the folder name of the `dataset`. For stored frames, `media` has the same
    sampling and preparation, augments them in training, and reads texts.
    """

    store: FeatureStore
    dataset: str
    media: MediaReader | None = None

    def __call__(self, video: VideoRecord, generator: np.random.Generator | None) -> Media | VideoFeatures:
        """Return Media with pixels (1, F, 3, S, S) or features with frames (1, F, D)."""
        if self.media is not None:
            pixels, mask, *times = (tensor[None] for tensor in self.store.item("pixels", self.key(video)))
            pixels = self.media.augmented(pixels, generator)
            return Media(list(pixels) if times else pixels, mask, times=times[0] if times else None)
        return self.store.video([self.key(video)], "patches" in self.store.parts)

    def empty(self) -> Media | VideoFeatures:
        """Return Media or features of zero videos with the other dimensions of the store."""
        if self.media is not None:
            return self.media.empty()
        return self.store.first_video("patches" in self.store.parts)[:0]

    def text(self, text: str) -> list[str] | Tokens | TextFeatures:
        """Return the caption as `media` does, or its features: sentence (1, D), words (1, W, D)."""
        return self.store.text([text]) if self.media is None else self.media.text(text)

    def key(self, video: VideoRecord) -> VideoKey:
        """Return the key of a video's features, or raise VideoError if extraction skipped it."""
        key = self.dataset, video.video_id, video.span
        for part in self.store.parts:
            if part != "text" and key in self.store.skipped(part):
                raise VideoError(video.path, f"skipped when features were extracted: {self.store.skipped(part)[key]}")
        return key

    def absent(self, split: Split) -> dict[int, str]:
        """Check that the store is complete for a split, and return why extraction skipped videos, by their index."""
        videos = {(self.dataset, video.video_id, video.span): video.path for video in split.videos}
        for part in self.store.parts:
            files = dict.fromkeys(text.text for text in split.texts) if part == "text" else videos
            self.store.require_items(part, files)
        found = (attempt(self.key, video) for video in split.videos)
        return {index: key.reason for index, key in enumerate(found) if isinstance(key, MediaError)}


VideoReader = MediaReader | StoreReader
