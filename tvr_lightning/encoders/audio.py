"""Interface of the audio encoders, for methods that use audio (GAID)."""

from abc import abstractmethod

import torch
from torch import Tensor

from tvr_lightning.data.audio_alignment import AudioKind
from tvr_lightning.data.batch import AudioInput, Media
from tvr_lightning.encoders.base import FeatureEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.features import VideoFeatures


class AudioEncoder(FeatureEncoder):
    """Base class of encoders that map the audio of M videos to one vector per frame, (M, F, D_a); always frozen.

    The data module aligns audio and frames. The released GAID code computes these features in advance
    (datasets/audio_feature_extraction.py), so the encoder is not trained there either. Features are computed in the
    precision of the weights, outside autocast, so that a feature store contains the same values.

    Attributes:
        dimension: Size D_a of the vectors.
        kind: Required input of `AudioOptions`; recipes link it to `data.init_args.audio`.
    """

    dimension: int
    kind: AudioKind

    def load_weights(self) -> None:
        """Load the weights that the constructor skipped inside `weights_follow`. Most encoders have none."""

    def encode_audio(self, video: Media | VideoFeatures) -> tuple[Tensor, Tensor]:
        """Return audio vectors (M, F, D_a), zero for silent frames, and their mask (M, F), encoded or from a store."""
        if isinstance(video, VideoFeatures):
            if video.audio is None or video.audio_mask is None:
                raise UserError("The stored features contain no audio. Add it to the store: tvr extract --parts audio")
            return video.audio, video.audio_mask
        if video.audio is None:
            raise UserError(f"The data has no audio. Set data.init_args.audio to {self.kind}")
        found = "whisper" if video.audio.values.ndim == 4 else "wav2vec2"
        if found != self.kind:
            raise UserError(f"The data has the audio of {found}. Set data.init_args.audio to {self.kind}")
        with torch.no_grad(), torch.autocast(video.audio.values.device.type, enabled=False):
            return self.encode_input(video.audio), video.audio.mask

    @abstractmethod
    def encode_input(self, audio: AudioInput) -> Tensor:
        """Return the audio vectors (M, F, D_a) of an audio input of M clips."""


def pool_steps(vectors: Tensor, windows: Tensor) -> Tensor:
    """Return the means (M, F, D_a) of the steps (M, S, D_a) in each frame's window (M, F, 2); 0 for empty ones.

    With the equal windows of "clip30" this is `adaptive_avg_pool1d`:
    https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/model/clip_stochastic.py#L50-L57
    """
    steps = torch.arange(vectors.shape[1], device=vectors.device)
    weights = ((steps >= windows[..., :1]) & (steps < windows[..., 1:])).to(vectors.dtype)
    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(1) @ vectors
