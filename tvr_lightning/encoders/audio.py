"""What every encoder of sound promises to the methods that hear (GAID)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tvr_lightning.data.audio_alignment import AudioKind
from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.encoders.fingerprint import fingerprint
from tvr_lightning.features import VideoFeatures


class AudioEncoder(nn.Module, ABC):
    """The sound of M videos to one vector per frame, (M, F, D_a), aligned as the data say; always frozen.

    The released GAID code computes these features beforehand (datasets/audio_feature_extraction.py), so they never
    train there either. They are computed in the precision of the weights, outside autocast, so that a feature store
    holds the same values.

    Attributes:
        dimension: D_a, size of the vectors.
        kind: required input of `AudioOptions`; recipes link it to `data.init_args.audio`.
    """

    dimension: int
    kind: AudioKind

    @classmethod
    def required_files(cls, **options: Any) -> list[Path]:
        """Return the files that building it with these options will read; nothing is built. By default there are none.

        Args:
            options: of the constructor, as recipes give them.

        Raises:
            MissingWeightsError: a file is not there and not to be had.
            ValueError: no such file can be meant.
        """
        return []

    def load_weights(self) -> None:
        """Load the weights that `weights_follow` kept the constructor from loading; most encoders have none."""

    def encode_audio(self, video: Media | VideoFeatures) -> tuple[Tensor, Tensor]:
        """Encode the sound of M videos; features from a store are returned unchanged.

        Args:
            video: media with an audio input, or features with audio.

        Returns:
            Audio vectors (M, F, D_a), zero where there is no sound, and their mask (M, F) bool.

        Raises:
            ValueError: the media or the store hold no sound, or sound for another encoder.
        """
        if isinstance(video, VideoFeatures):
            if video.audio is None or video.audio_mask is None:
                raise ValueError(
                    "The stored features contain no audio. Add it to the store: `tvr extract --parts audio`"
                )
            return video.audio, video.audio_mask
        if video.audio is None:
            raise ValueError(f"The data has no audio. Set data.init_args.audio to {self.kind}")
        with torch.no_grad(), torch.autocast(video.audio.values.device.type, enabled=False):
            return self.encode_input(video.audio), video.audio.mask

    @abstractmethod
    def encode_input(self, audio: AudioInput) -> Tensor:
        """Return (M, F, D_a) for an input of M clips: the part of `encode_audio` that computes."""

    @abstractmethod
    def configuration(self) -> dict[str, object]:
        """Everything besides the weights that changes the features."""

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of `configuration()` and all weights: another value whenever either changes."""
        return fingerprint(self.configuration(), self)

    def _check(self, audio: AudioInput) -> None:
        dimensions = {"whisper": 4, "wav2vec2": 2}[self.kind]
        if audio.values.ndim != dimensions:
            found = {4: "log-mel windows for whisper", 2: "waveforms for wav2vec2"}.get(audio.values.ndim, "neither")
            raise ValueError(
                f"{type(self).__name__} needs the input {self.kind!r}, but the data has {found} of shape "
                f"{tuple(audio.values.shape)}. Set data.init_args.audio to {self.kind}"
            )


def pool_steps(vectors: Tensor, windows: Tensor) -> Tensor:
    """Average the vectors of each frame's steps.

    With the equal windows of "clip30" this is `adaptive_avg_pool1d` (GAID, model/clip_stochastic.py).
    https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/model/clip_stochastic.py#L50-L57

    Args:
        vectors: (M, S, D_a), one per step of 20 ms.
        windows: (M, F, 2) int64, first and one-past-last step of each frame.

    Returns:
        (M, F, D_a), zero where a window is empty.
    """
    steps = torch.arange(vectors.shape[1], device=vectors.device)
    inside = (steps >= windows[..., :1]) & (steps < windows[..., 1:])
    weights = inside.to(vectors.dtype)
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1) @ vectors
