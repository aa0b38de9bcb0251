"""A trained method as the search uses it: how its videos are read, its features of texts and videos, its score."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tvr_lightning.checkpoints import CheckpointError, check_arguments, check_classes, find_class, read_checkpoint
from tvr_lightning.data.audio_alignment import AudioKind, AudioOptions, add_sound, audio_input
from tvr_lightning.data.batch import Media, TextBatch, VideoBatch
from tvr_lightning.data.stored import frame_fingerprint
from tvr_lightning.encoders import ClipEncoder
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.extract.fingerprint import method_fingerprint
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.media.audio import SAMPLE_RATE, STEPS_PER_SECOND, AudioTrack
from tvr_lightning.media.augment import FrameTransform
from tvr_lightning.media.sampling import FrameSampling
from tvr_lightning.media.video import read_clip
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.search.errors import SearchError
from tvr_lightning.store import Fingerprint


@dataclass(frozen=True)
class ScorerSource:
    """Where a scorer comes from; an index keeps it.

    Attributes:
        checkpoint: File written by `tvr fit`. None for CLIP4Clip's mean pooling, which has no weights of its own.
        architecture: open_clip name of the encoder, without a checkpoint.
        weights: Weights of that encoder: a file, an open_clip tag, or "none" for random ones.
        seed: Seed for random weights.
        frames: Number of frames F, without a checkpoint.
        sampling: Rule for selecting frames, without a checkpoint.
    """

    checkpoint: str | None = None
    architecture: str = "ViT-B-32"
    weights: str = "openai"
    seed: int = 0
    frames: int = 12
    sampling: FrameSampling = "one-fps-uniform"


@dataclass(frozen=True)
class Clip:
    """One video as read.

    Attributes:
        media: of one video, pixels (1, F, 3, S, S).
        times: (F,) float32 seconds of the frames, 0 where padded.
    """

    media: Media
    times: Tensor


class Scorer:
    """A method in evaluation mode, without gradients.

    Args:
        source: where it comes from.
        device: where it runs.
        trust: modules whose classes the checkpoint may name besides this package's.

    Raises:
        SearchError: the checkpoint is none of a retrieval method.
        CheckpointError: it is absent, damaged, or names classes of other modules.
        MissingAssetError: the encoder's weights are absent.
    """

    def __init__(self, source: ScorerSource, device: str = "cpu", trust: Sequence[str] = ()) -> None:
        self.source, self.device = source, device
        if source.checkpoint is None:
            data: dict[str, Any] = {"sampling": source.sampling}
            self.module = _mean_pooling(source)
        else:
            self.module, data = _from_checkpoint(Path(source.checkpoint), trust)
        self.module.to(device).eval().requires_grad_(False)
        self.name = type(self.module).__name__.lower()
        self.sampling: FrameSampling = data.get("sampling") or "one-fps-uniform"
        self.preparation = dataclasses.replace(self.module.encoder.preparation, antialias=data.get("antialias", True))
        self.audio = _audio_options(self.module, data)
        self._first = TwoStage(mask_frames=True)
        options = {name: value for name, value in self.module.hparams.items() if name != "optimizer"}
        sound = {} if self.audio is None else {"sound": self.audio.describe()}
        self.fingerprint: Fingerprint = {
            **method_fingerprint(self.module, self.module.encoder, options),
            **frame_fingerprint(self.module.frames, self.preparation, self.sampling),
            **sound,
        }

    @property
    def reading(self) -> tuple[object, ...]:
        """What `read` depends on besides the file; scorers of equal reading can share a clip."""
        sound = None if self.audio is None else self.audio.describe()
        return self.module.frames, self.preparation, self.sampling, sound

    def read(self, path: Path, prepare: FrameTransform | None = None) -> Clip:
        """Decode one video as the method was trained to see and hear it.

        Args:
            path: a video file.
            prepare: makes of each frame what the encoder's own preparation would.

        Raises:
            VideoError: it cannot be decoded.
        """
        clip = read_clip(
            path,
            frames=self.module.frames,
            image_size=self.preparation.image_size,
            sampling=self.sampling,
            augment=prepare or self.preparation,
        )
        duration = torch.tensor([clip.duration], dtype=torch.float32)
        media = Media(clip.pixels[None], clip.frame_mask[None], duration=duration)
        if self.audio is not None:
            add_sound(media, path, None, clip, self.audio, "skip")
        return Clip(media, clip.timestamps)

    def still(self, picture: Image.Image) -> Clip:
        """Return a picture as a clip of one second that shows nothing else, without sound.

        Args:
            picture: of mode RGB and any size.
        """
        frames, size = self.module.frames, self.preparation.image_size
        square = torch.from_numpy(self.preparation(picture).copy()).permute(2, 0, 1)
        pixels = square.expand(1, frames, 3, size, size)
        times, mask = torch.zeros(frames), torch.ones(1, frames, dtype=torch.bool)
        media = Media(pixels.contiguous(), mask, duration=torch.ones(1))
        if self.audio is not None:
            silence = AudioTrack(np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE, np.zeros(STEPS_PER_SECOND, bool))
            media.audio = audio_input(silence, self.audio, times, mask[0], 1.0)
            media.audio_mask = media.audio.mask
        return Clip(media, times)

    @torch.no_grad()
    def encode_videos(self, media: Media) -> VideoFeatures:
        """Return what `score` takes of M videos, in main memory."""
        index = torch.arange(len(media))
        batch = VideoBatch(media, index, [str(i) for i in range(len(media))]).to(self.device)
        return self.module.video_features(batch).float().to("cpu")

    @torch.no_grad()
    def encode_texts(self, texts: list[str]) -> TextFeatures:
        """Return what `score` takes of N texts, in main memory."""
        batch = TextBatch(texts, torch.arange(len(texts)))
        return self.module.text_features(batch).float().to("cpu")

    @torch.no_grad()
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        """Score N texts against M videos: the second stage."""
        scores = self.module.score(text.to(self.device), video.to(self.device))
        return Scores(scores.similarity.float().cpu())

    def sound_share(self, text: TextFeatures, video: VideoFeatures) -> Tensor | None:
        """Return how much of the scores (N, M) the sound brought: less what is left with the picture in its place.

        None where the method does not hear.
        """
        if video.audio is None or self.audio is None:
            return None
        # GAID blends frames and sound; sound that equals the frames changes nothing, whatever the gate says.
        silent = dataclasses.replace(video, audio=video.frames)
        return self.score(text, video).similarity - self.score(text, silent).similarity

    def text_vectors(self, text: TextFeatures) -> Tensor:
        """Return the (N, D) vectors of length 1 that the first stage compares."""
        return unit(self._first.text_vectors(text))

    def video_vectors(self, video: VideoFeatures) -> Tensor:
        """Return the (M, D) vectors of length 1 that the first stage compares: the means of the real frames."""
        return unit(self._first.video_vectors(video))

    def gamma(self) -> float:
        """Return what the method divides its scores by."""
        return self.module.score_temperature()

    def truncated(self, text: str) -> bool:
        """Whether a text has more tokens than the method reads."""
        needed: Any = getattr(getattr(self.module.encoder, "tokenizer", None), "needed", None)
        return needed is not None and bool(needed(text) > self.module.words)


def _mean_pooling(source: ScorerSource) -> RetrievalModule:
    with torch.random.fork_rng():
        torch.manual_seed(source.seed)  # random weights must be the same whenever the index is opened
        try:
            encoder = ClipEncoder(source.architecture, source.weights)
        except ValueError as error:
            raise SearchError(str(error).replace("encoder.weights", "--weights")) from error
    return CLIP4Clip(encoder, frames=source.frames)


def _from_checkpoint(path: Path, trusted: Sequence[str]) -> tuple[RetrievalModule, dict[str, Any]]:
    saved = read_checkpoint(path)
    check_classes(path, saved, trusted)
    class_path = str(saved["hyper_parameters"].get("_class_path"))
    kind = find_class(path, class_path)
    if not issubclass(kind, RetrievalModule):
        raise SearchError(f"{path} contains {class_path}, but searching needs the checkpoint of a retrieval method")
    if "encoder" not in saved["hyper_parameters"]:
        raise SearchError(f"{path} does not record its encoder. Convert it again, or train with tvr fit.")
    check_arguments(path, kind, saved["hyper_parameters"])
    try:
        with weights_follow():
            module = kind.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ArgumentError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: {class_path} cannot be built with the recorded options: {_line(error)}"
        ) from error
    data = saved.get("datamodule_hyper_parameters") or {}
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: datamodule_hyper_parameters is a {type(data).__name__}, expected named options")
    if data.get("sampling") and data["sampling"] not in get_args(FrameSampling):
        raise CheckpointError(
            f"{path}: sampling is {data['sampling']!r}; expected {', '.join(get_args(FrameSampling))}"
        )
    return module, data


def _line(error: Exception) -> str:
    """Return what an error says, in one line."""
    message = f"no {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(message.split())[:500]


def _audio_options(module: RetrievalModule, data: dict[str, Any]) -> AudioOptions | None:
    if getattr(module, "audio_encoder", None) is None:
        return None
    kind: AudioKind = data.get("audio", "none")
    if kind not in get_args(AudioKind):  # converted checkpoints do not say
        kind = "wav2vec2" if "Wav2Vec2" in type(module.audio_encoder).__name__ else "whisper"
    return AudioOptions(kind, data.get("audio_alignment", "duration"), data.get("audio_seconds", 60.0))
