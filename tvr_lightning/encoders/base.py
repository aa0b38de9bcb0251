"""Interface of the encoders of texts and videos."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from tvr_lightning.data.batch import Media, Tokens
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.preparation import Interpolation, Preparation, ResizeMode
from tvr_lightning.option_types import Role

EncoderPrecision = Annotated[Literal["float32", "float16"], Role.TRAINING]
Tower = Literal["text", "video"]


@dataclass
class TemporalInitialization:
    """Weights of the text transformer that initialize a temporal transformer (CLIP4Clip, modules/modeling.py).

    Attributes:
        blocks: State (float32) of each of the first blocks, under the names `ln_1.weight`, `attn.in_proj_weight`,
            `attn.out_proj.weight`, `mlp.c_fc.weight`, `mlp.c_proj.weight`, `ln_2.weight` and their biases.
        positional_embedding: Embedding (L, D) float32 for context length L and width D.
        heads: Number of attention heads of the text transformer.
    """

    blocks: list[dict[str, Tensor]]
    positional_embedding: Tensor
    heads: int


class FeatureEncoder(nn.Module, ABC):
    """Base class of encoders of texts, videos, and audio."""

    @classmethod
    def required_files(cls, **options: Any) -> list[Path]:
        """Return the files that the constructor reads with these options, by default none. Nothing is built."""
        return []

    @abstractmethod
    def configuration(self) -> dict[str, object]:
        """Return all settings that affect the features, without the weights: architecture, preprocessing, switches."""

    def fingerprint(self) -> str:
        """Return the SHA-256 of `configuration()` and all weights, gathered if sharded: call it on every rank."""
        return fingerprint(self.configuration(), self.state_dict())


class Encoder(FeatureEncoder):
    """Base class of encoders that map texts and videos to features, each without access to the others.

    A feature store can therefore replace the encoder.

    Attributes:
        dimension: Size D of every feature vector.
        image_size: Side S of the square frames in pixels.
        context_length: Maximum number of token positions W, including SOT and EOT.
        resize_mode: Method for making frames square; CLIP's by default.
        interpolation: Interpolation for resizing; CLIP's by default.
        encoder_precision: Data type of the matrices.
        gives_patches: Whether there are vectors of patches in addition to those of frames.
        gives_frames: Whether each frame has a vector; otherwise a video has one vector (F = 1), or one per token.
        fixed_frames: Number of frames that every video must have; None for any number.
        most_frames: Maximum number of frames per video; None for any number.
        remarks: Warnings for a results table.
        text_preparation: Short description of the tokenization, which is part of the fingerprint of stored features.
    """

    dimension: int
    image_size: int
    context_length: int
    resize_mode: ResizeMode = "shortest"
    interpolation: Interpolation = "bicubic"
    encoder_precision: EncoderPrecision = "float32"
    gives_patches: bool = True
    gives_frames: bool = True
    fixed_frames: int | None = None
    most_frames: int | None = None
    remarks: Sequence[str] = ()
    text_preparation: str = "the encoder's own tokens"
    _said_fewer = False

    @property
    def preparation(self) -> Preparation:
        """Preprocessing that turns frames of any size into inputs of the encoder."""
        return Preparation(self.image_size, self.interpolation, self.resize_mode)

    def encode_text(self, text: list[str] | Tokens | TextFeatures, words: int, trim: bool = False) -> TextFeatures:
        """Encode N captions, their tokens, or stored features to sentence (N, D), words (N, W, D), word_mask (N, W).

        W is the smaller of `words` (including SOT and EOT) and `context_length`. With `trim`, positions after the
        longest tokenized caption are not computed, and their words are zero.
        """
        if isinstance(text, TextFeatures):
            return text
        words = self.positions(words)
        if trim and isinstance(text, Tokens):
            return self.encode_tokenized(text.trimmed(), words).padded(words)
        return self.encode_tokenized(text, words) if isinstance(text, Tokens) else self.encode_captions(text, words)

    def caption_tokens(self, words: int) -> Callable[[list[str]], Tokens] | None:
        """Return a picklable tokenizer (`words` positions) for worker processes. None if the encoder takes strings."""
        return None

    def positions(self, words: int) -> int:
        """Return the number of token positions W of a caption, and log once if it is less than `words`."""
        if words > self.context_length and not self._said_fewer:
            self._said_fewer = True
            rank_zero_info(
                f"words is {words}, but {getattr(self, 'name', type(self).__name__)} has a context length of "
                f"{self.context_length}. Captions are truncated to it."
            )
        return min(words, self.context_length)

    def encode_video(self, video: Media | VideoFeatures, patches: bool = False) -> VideoFeatures:
        """Encode pixels (M, F, 3, S, S) to frames (M, F, D), frame_mask (M, F) and, on request, patches (M, F, P, D).

        Features from a store are returned unchanged.
        """
        if not isinstance(video, VideoFeatures):
            self.check_patches(patches)
            return self.encode_media(video, patches)
        if patches and video.patches is None:
            raise UserError("The stored features contain no patches. Extract them again with patches.")
        return video

    def check_vectors(self, method: str, frames: bool, patches: bool) -> None:
        """Refuse a method that needs vectors of frames or of patches if there are none."""
        if frames and not self.gives_frames:
            raise UserError(
                f"{method} compares frames, but {getattr(self, 'name', type(self).__name__)} gives one vector per "
                "video. Use CLIP4Clip with mean pooling, as in recipes/zero-shot.yaml, or an encoder of frames "
                "(SentenceTransformersEncoder: input: frames)."
            )
        self.check_patches(patches)

    def check_patches(self, needed: bool) -> None:
        """Refuse a need for vectors of patches if there are none."""
        if needed and not self.gives_patches:
            raise UserError(
                f"{getattr(self, 'name', type(self).__name__)} gives no patches. Choose a method without them, or "
                "another encoder."
            )

    def check_frames(self, frames: int) -> None:
        """Refuse more frames per video than the encoder takes."""
        if self.most_frames is not None and frames > self.most_frames:
            name = getattr(self, "name", type(self).__name__)
            raise UserError(f"frames is {frames}, but {name} takes {self.most_frames}. Lower data.init_args.frames.")

    @abstractmethod
    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        """Encode N caption strings to sentences (N, D) and words (N, W, D), as in `encode_text`."""

    def encode_tokenized(self, tokens: Tokens, words: int) -> TextFeatures:
        """Encode N captions tokenized by `caption_tokens`, to the same features as `encode_captions`."""
        return self.encode_captions(tokens.captions, words)

    @abstractmethod
    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        """Encode decoded media of M videos to frames (M, F, D) and patches, as in `encode_video`."""

    def inputs_used(self) -> dict[str, object]:
        """Return information for results about inputs that the encoder selected itself; empty by default."""
        return {}

    def temporal_initialization(self, layers: int) -> TemporalInitialization | None:
        """Return the state for a temporal transformer of `layers` blocks, or None if the architecture does not fit."""
        return None

    @abstractmethod
    def initial_logit_scale(self) -> float:
        """Return the logarithm of the temperature factor in the weights: OpenAI's ln 100, random weights ln(1/0.07)."""

    def initial_logit_bias(self) -> float:
        """Return the bias of the logits: nonzero for weights trained with a sigmoid (SigLIP), otherwise 0."""
        return 0.0

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the mode; dropout and batch norms of a frozen encoder stay in eval mode."""
        return super().train(mode and any(parameter.requires_grad for parameter in self.parameters()))

    def blocks(self, tower: Tower) -> list[nn.Module]:
        """Return the transformer blocks of a tower in their order, which `tuning` needs."""
        raise UserError(f"tuning: {type(self).__name__} names no transformer blocks. Use FineTuning or Frozen.")

    @classmethod
    def small(cls, **options: Any) -> dict[str, Any]:
        """Return the section of a small encoder with random weights for tests, given a recipe's; by default that."""
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": options}

    @classmethod
    def check_trainer(cls, precision: str, strategy: str, **options: Any) -> None:
        """Refuse a precision or strategy (Lightning's names) that is not supported with the constructor's options."""


def fingerprint(configuration: Mapping[str, object], state: Mapping[str, Tensor]) -> str:
    """Return the hexadecimal SHA-256 of named settings and of named weights and buffers (any shapes).

    Sharded weights are gathered, so every rank must call it.
    """
    digest = hashlib.sha256()
    for key, value in sorted(configuration.items()):
        digest.update(f"{key}={value!r};".encode())
    for name, tensor in sorted(state.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole = cast(Tensor, whole).detach().cpu().contiguous()
        digest.update(f"{name}:{whole.dtype}:{tuple(whole.shape)};".encode())
        # numpy does not support bfloat16
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
