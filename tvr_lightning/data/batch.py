"""Batches that a DataLoader passes to a method: captions and media, each with its index in the dataset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tvr_lightning.features import WHOLE, FeatureBatch, TextFeatures, VideoFeatures
from tvr_lightning.media.clip_file import ClipFile


@dataclass
class AudioInput(FeatureBatch):
    """Input of an audio encoder for M clips, in steps of 20 ms (one vector of Whisper or wav2vec2).

    Attributes:
        values: (M, C, 80, 3000) log-mel windows of 30 s for Whisper, or (M, T) waveforms at 16 kHz for wav2vec2;
            float32, zero if there is no audio.
        samples: (M,) int64, length of the clip within `values` in samples at 16 kHz; 0 without audio.
        steps: (M,) int64, number of vectors that `windows` refers to; the encoder interpolates its output to it.
        windows: (M, F, 2) int64, first and one-past-last step of each frame; equal if there is no audio.
        last: one-past-last step of each clip, as a list, so that reading it does not wait for a device.
    """

    values: Tensor
    samples: Tensor
    steps: Tensor
    windows: Tensor
    last: list[int]

    @property
    def mask(self) -> Tensor:
        """Mask (M, F) bool, True for frames with audio."""
        return self.windows[..., 1] > self.windows[..., 0]


@dataclass
class Media(FeatureBatch):
    """Decoded media of M videos, in the input format of the encoders.

    Attributes:
        pixels: (M, F, 3, S, S) uint8 RGB, or float16 if resized without antialiasing; padded frames are zero. The
            encoder normalizes on its device. If frames keep their own size, a list of M clips (K, 3, H, W) without
            padding, or of M files that are not decoded.
        frame_mask: (M, F) bool, True for frames that are not padding.
        audio: Input of the audio encoder (log-mel or waveform) with the steps of each frame, if audio is read.
        times: (M, F) float32, seconds from the start of the clip to each frame, if frames keep their own size.
        problems: "path: reason" for each damaged audio track, of which only the readable part is used.
    """

    pixels: Tensor | list[Tensor] | list[ClipFile]
    frame_mask: Tensor
    audio: AudioInput | None = None
    times: Tensor | None = None
    problems: list[str] = field(default_factory=list, metadata=WHOLE)


@dataclass
class Tokens(FeatureBatch):
    """Token IDs of N captions, computed in the worker processes. Iteration yields the strings.

    `ids` (N, W) int64 are padded like the output of the encoder's tokenizer; `mask` (N, W) bool is False for padding.
    `needed` are the positions that each caption needs, as a list, so that reading it does not wait for a device.
    """

    captions: list[str]
    ids: Tensor
    mask: Tensor
    needed: list[int]

    def __iter__(self) -> Iterator[str]:
        return iter(self.captions)

    def trimmed(self) -> Tokens:
        """Return the positions up to the longest caption, rounded up to a multiple of 8 for fewer different shapes."""
        longest = -(-max(self.needed, default=0) // 8) * 8
        return dataclasses.replace(self, ids=self.ids[:, :longest], mask=self.mask[:, :longest])


@dataclass
class TextBatch(FeatureBatch):
    """N texts: strings, token IDs, or features from a store, sentences (N, D) and words (N, W, D).

    `index` (N,) int64 is the index of each text in the dataset.
    """

    text: list[str] | Tokens | TextFeatures
    index: Tensor

    def anonymous(self) -> TextBatch:
        """Return the N texts for a method to encode in evaluation: every index is replaced by -1."""
        return TextBatch(self.text, torch.full_like(self.index, -1))


@dataclass
class VideoBatch(FeatureBatch):
    """M videos. `video` is decoded media, pixels (M, F, 3, S, S), or features from a store, frames (M, F, D).

    `index` (M,) int64 is the index of each video in the dataset. `video_id` identifies the videos in errors and
    results; `skipped` lists files that could not be read while building this batch, each with its reason.
    """

    video: Media | VideoFeatures
    index: Tensor
    video_id: list[str]
    skipped: list[str] = field(default_factory=list, metadata=WHOLE)

    def anonymous(self) -> VideoBatch:
        """Return the M videos for a method to encode in evaluation: without IDs and paths, and every index is -1."""
        video = dataclasses.replace(self.video, problems=[]) if isinstance(self.video, Media) else self.video
        return VideoBatch(video, torch.full_like(self.index, -1), [""] * len(self.index))


@dataclass
class PairBatch(FeatureBatch):
    """B matching pairs for training: row i of `text` describes row i of `video`.

    `extras` (first dimension B, keyed by name) becomes `PairedFeatures.extras` after encoding.
    """

    text: TextBatch
    video: VideoBatch
    extras: dict[str, Any] = field(default_factory=dict)
