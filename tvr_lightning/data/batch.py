"""What a DataLoader hands to a method: captions and media, each with its place in the dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.features import WHOLE, Record, TextFeatures, VideoFeatures


@dataclass
class AudioInput(Record):
    """What an audio encoder takes for M clips, counted in steps of 20 ms (one vector of Whisper or wav2vec2).

    Attributes:
        values: (M, C, 80, 3000) log-mel windows of 30 s for Whisper, or (M, T) waveforms at 16 kHz for wav2vec2;
            float32, zero where there is no sound.
        samples: (M,) int64, how much of `values` belongs to the clip, in samples at 16 kHz; 0 without sound.
        steps: (M,) int64, number of vectors that `windows` counts on; the encoder stretches its output to it.
        windows: (M, F, 2) int64, first and one-past-last step that belong to each frame; equal where there is no sound.
    """

    values: Tensor
    samples: Tensor
    steps: Tensor
    windows: Tensor

    @property
    def mask(self) -> Tensor:
        """(M, F) bool, True where a frame has sound."""
        return self.windows[..., 1] > self.windows[..., 0]


@dataclass
class Media(Record):
    """Decoded media of M videos, as the encoders take them.

    Attributes:
        pixels: (M, F, 3, S, S) uint8 RGB, or float16 if resized without antialiasing; padded frames are zero. The
            encoder normalizes on its device.
        frame_mask: (M, F) bool, True where there is a frame.
        audio: input of the audio encoder (log-mel or waveform) with the steps of each frame, where it is asked for.
        audio_mask: (M, F) bool, True where a frame has sound.
        duration: (M,) float32, seconds.
        problems: "path: reason" of sound tracks that are broken in places; they sound as far as they go.
    """

    pixels: Tensor
    frame_mask: Tensor
    audio: AudioInput | None = None
    audio_mask: Tensor | None = None
    duration: Tensor | None = None
    problems: list[str] = field(default_factory=list, metadata=WHOLE)


@dataclass
class Tokens(Record):
    """N captions as token ids, as worker processes bring them; iterating gives the strings.

    Attributes:
        captions: the N strings.
        ids: (N, W) int64, padded as the encoder's tokenizer does.
        mask: (N, W) bool, True where a caption has a token.
        needed: positions that each caption needs uncut; a list, so that none waits for a device to count them.
    """

    captions: list[str]
    ids: Tensor
    mask: Tensor
    needed: list[int]

    def __iter__(self) -> Iterator[str]:
        """Yield the N captions, so that texts are read alike whether they are tokenised or not."""
        return iter(self.captions)


@dataclass
class TextBatch(Record):
    """N texts.

    Attributes:
        text: captions as strings or token ids, or features from a store: sentences (N, D) and words (N, W, D).
        index: (N,) int64, each text's place.
    """

    text: list[str] | Tokens | TextFeatures
    index: Tensor

    def anonymous(self) -> TextBatch:
        """Return the N texts without their places: every index is -1. It is what methods encode in evaluation."""
        return TextBatch(self.text, torch.full_like(self.index, -1))


@dataclass
class VideoBatch(Record):
    """M videos. `video` holds decoded media, pixels (M, F, 3, S, S), or features from a store, frames (M, F, D).

    `index` (M,) int64 is each video's place. `video_id` names the videos in errors and results;
    `skipped` names files that could not be read on the way to this batch, each with its reason.
    """

    video: Media | VideoFeatures
    index: Tensor
    video_id: list[str]
    skipped: list[str] = field(default_factory=list, metadata=WHOLE)

    def anonymous(self) -> VideoBatch:
        """Return the M videos without places, names and paths: every index is -1. Methods encode it in evaluation."""
        video = dataclasses.replace(self.video, problems=[]) if isinstance(self.video, Media) else self.video
        return VideoBatch(video, torch.full_like(self.index, -1), [""] * len(self.index))


@dataclass
class PairBatch(Record):
    """B matching pairs for training: row i of `text` describes row i of `video`.

    `extras` (first dimension B, keyed by name) goes into `PairedFeatures.extras` after encoding.
    """

    text: TextBatch
    video: VideoBatch
    extras: dict[str, Any] = field(default_factory=dict)
