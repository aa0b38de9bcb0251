"""A trained method as search uses it: reading videos, encoding texts and videos, scoring."""

import dataclasses
from argparse import ArgumentError
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from lightning.pytorch.cli import instantiate_module
from PIL import Image
from torch import Tensor

from tvr_lightning.config.check import Source, merge
from tvr_lightning.config.recipe import recipe_schema
from tvr_lightning.data.audio_alignment import AudioKind, AudioOptions, audio_input, clip_media, frames_media
from tvr_lightning.data.batch import Media, TextBatch, VideoBatch
from tvr_lightning.data.readers import frame_fingerprint
from tvr_lightning.encoders import ClipEncoder
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import weights_follow
from tvr_lightning.extract.fingerprint import method_fingerprint
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.cosine import unit
from tvr_lightning.layers.pooling import masked_mean
from tvr_lightning.media.audio import SAMPLE_RATE, STEPS_PER_SECOND, AudioTrack
from tvr_lightning.media.preparation import FrameTransform
from tvr_lightning.media.video import padded_clip, read_clip
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.option_types import FrameSampling, check_value, schema_of
from tvr_lightning.search.errors import SearchError
from tvr_lightning.store import Fingerprint
from tvr_lightning.training.checkpoints import FROZEN, CheckpointError, find_class, read_checkpoint, trusted_sections


@dataclass(frozen=True)
class ScorerSource:
    """Checkpoint of a method, or encoder of CLIP4Clip's mean pooling: open_clip name, and a file, tag, or "none"."""

    checkpoint: str | None = None
    architecture: str = "ViT-B-32"
    weights: str = "openai"
    frames: int = 12
    sampling: FrameSampling = "one-fps-uniform"

    def __post_init__(self) -> None:
        for option in ("checkpoint", "weights"):  # an index may be opened from another working directory
            if (value := getattr(self, option)) and Path(value).is_file():
                object.__setattr__(self, option, str(Path(value).resolve()))


@dataclass(frozen=True)
class Clip:
    """One decoded video: media of one clip, the times of the frames (F,), 0 for padding, and the duration in s."""

    media: Media
    times: Tensor
    duration: float


class Scorer:
    """A method in evaluation mode. The checkpoint may run code of modules and model repositories in `trust`.

    Raises:
        CheckpointError: It is missing or damaged, contains no retrieval method, or would run other code.
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
        options = {name: value for name, value in self.module.hparams.items() if name != "optimizer"}
        sound = None if self.audio is None else self.audio.describe()
        self.fingerprint: Fingerprint = {
            **method_fingerprint(self.module, self.module.encoder, options),
            **frame_fingerprint(self.module.frames, self.preparation, self.sampling),
            **({} if sound is None else {"sound": sound}),
        }
        self.reading = (self.module.frames, self.preparation, self.sampling, sound)
        """Options of `read`. Scorers with equal ones can share a clip."""

    def read(self, path: Path, prepare: FrameTransform | None = None, audio: Path | None = None) -> Clip:
        """Decode a video as in training.

        `prepare` replaces the encoder's own preparation of a frame, and `audio` the file from which audio is read.
        """
        clip = read_clip(path, self.module.frames, prepare or self.preparation, self.sampling)
        media = clip_media(clip, audio or path, None, self.audio, is_square=self.preparation.is_square)
        return Clip(media, clip.timestamps, clip.duration)

    def still(self, image: Image.Image) -> Clip:
        """Return an RGB image as a silent clip of one second."""
        frames, is_square = self.module.frames, self.preparation.is_square
        shown = [self.preparation(image)] * (frames if is_square else min(frames, 2))  # a video model pairs frames
        clip = padded_clip(shown, np.zeros(len(shown)), frames, 1.0)
        media = frames_media(clip, clip.timestamps, is_square)
        if self.audio is not None:
            silence = AudioTrack(np.zeros(SAMPLE_RATE, np.float32), np.zeros(STEPS_PER_SECOND, bool))
            media.audio = audio_input(silence, self.audio, clip.timestamps, clip.frame_mask, 1.0)
        return Clip(media, clip.timestamps, 1.0)

    @torch.no_grad()
    def encode_videos(self, media: Media) -> VideoFeatures:
        """Return the features of M videos in main memory, frames (M, F, D)."""
        index = torch.arange(len(media))
        batch = VideoBatch(media, index, [str(i) for i in range(len(media))]).to(self.device)
        return self.module.video_features(batch).float().to("cpu")

    @torch.no_grad()
    def encode_texts(self, texts: list[str]) -> TextFeatures:
        """Return the features of N texts in main memory, sentences (N, D) and words (N, W, D)."""
        batch = TextBatch(texts, torch.arange(len(texts)))
        return self.module.text_features(batch).float().to("cpu")

    @torch.no_grad()
    def score(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Return the scores (N, M) of texts and videos: the second stage."""
        return self.module.score(text.to(self.device), video.to(self.device)).similarity.float().cpu()

    def text_vectors(self, text: TextFeatures) -> Tensor:
        """Return the (N, D) vectors of length 1 that the first stage compares."""
        return unit(text.sentence)

    def video_vectors(self, video: VideoFeatures) -> Tensor:
        """Return the (M, D) vectors of length 1 that the first stage compares: the means of the real frames."""
        return unit(masked_mean(video.frames, video.frame_mask))

    def truncated(self, text: str) -> bool:
        """Return whether a text has more tokens than the method uses."""
        needed: Any = getattr(getattr(self.module.encoder, "tokenizer", None), "needed", None)
        return needed is not None and bool(needed(text) > self.module.words)


def _mean_pooling(source: ScorerSource) -> RetrievalModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # random weights must be the same each time the index is opened
        try:
            encoder = ClipEncoder(source.architecture, source.weights)
        except MissingWeightsError:
            raise
        except ValueError as error:
            raise SearchError(str(error).replace("encoder.weights", "--weights")) from error
    return CLIP4Clip(encoder, frames=source.frames)


def _from_checkpoint(path: Path, trusted: Sequence[str]) -> tuple[RetrievalModule, dict[str, Any]]:
    saved = read_checkpoint(path)
    sections = trusted_sections(path, saved, trusted)
    recorded = {name: value for name, value in saved["hyper_parameters"].items() if name != "_instantiator"}
    class_path = recorded.get("_class_path")
    if class_path is None:
        raise CheckpointError(
            f"{path} does not record its encoder, which was built in Python. Pass an equal one to its method's "
            "load_from_checkpoint as `encoder`, or train with a recipe, which records the encoder."
        )
    kind = find_class(path, str(class_path))
    if not issubclass(kind, RetrievalModule):
        raise CheckpointError(f"{path} contains {class_path}, but searching needs the checkpoint of a retrieval method")
    data = sections["data"]["init_args"]
    check_value(f"{path}: sampling", schema_of(FrameSampling | None), data.get("sampling"))  # the class may be missing
    merge([Source(f"{path}: ", sections)], recipe_schema())
    try:
        with nullcontext() if FROZEN in saved else weights_follow():
            module = instantiate_module(kind, recorded)
            module.load_weights(saved)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except MissingWeightsError:
        raise
    except (ArgumentError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:500]
        raise CheckpointError(f"{path}: {class_path} cannot be built with the recorded options: {reason}") from error
    return module, data


def _audio_options(module: RetrievalModule, data: dict[str, Any]) -> AudioOptions | None:
    if getattr(module, "audio_encoder", None) is None:
        return None
    kind: AudioKind = data.get("audio", "none")
    if kind not in get_args(AudioKind):  # converted checkpoints do not record it
        kind = "wav2vec2" if "Wav2Vec2" in type(module.audio_encoder).__name__ else "whisper"
    return AudioOptions(kind, data.get("audio_alignment", "duration"), data.get("audio_seconds", 60.0))
