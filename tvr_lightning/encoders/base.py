"""What every encoder of texts and videos promises to the methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from tvr_lightning.data.batch import Media, Tokens
from tvr_lightning.encoders.fingerprint import fingerprint
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.media.preparation import Interpolation, Preparation, ResizeMode

FreezeRule = Literal["none", "clip4clip", "conv1", "all"]
EncoderPrecision = Literal["float32", "float16"]


@dataclass
class TemporalInitialization:
    """What a temporal transformer over frames takes over from the text transformer (CLIP4Clip, modules/modeling.py).

    Attributes:
        blocks: float32 state of each of the first blocks, under the names `ln_1.weight`, `attn.in_proj_weight`,
            `attn.out_proj.weight`, `mlp.c_fc.weight`, `mlp.c_proj.weight`, `ln_2.weight` and their biases.
        positional_embedding: (L, D) float32, L the context length and D the width.
        heads: attention heads of the text transformer.
    """

    blocks: list[dict[str, Tensor]]
    positional_embedding: Tensor
    heads: int


class Encoder(nn.Module, ABC):
    """Texts and videos to features, each on its own: what a feature store may hold in its place.

    Attributes:
        dimension: D, size of every feature vector.
        image_size: S, side of the square frames in pixels.
        context_length: maximum number of token positions W, including SOT and EOT.
        resize_mode: method for making frames square; CLIP's by default.
        interpolation: interpolation of the resizing; CLIP's by default.
        encoder_precision: dtype of the matrices.
        gives_patches: whether there are vectors of patches in addition to those of frames.
    """

    dimension: int
    image_size: int
    context_length: int
    resize_mode: ResizeMode = "shortest"
    interpolation: Interpolation = "bicubic"
    encoder_precision: EncoderPrecision = "float32"
    gives_patches: bool = True
    _said_fewer = False

    @property
    def preparation(self) -> Preparation:
        """How frames of any size become those that the encoder takes."""
        return Preparation(self.image_size, self.interpolation, self.resize_mode)

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

    @property
    def text_preparation(self) -> str:
        """How captions become tokens, in a few words that fingerprints of stored features hold."""
        return "the encoder's own tokens"

    def encode_text(self, text: list[str] | Tokens | TextFeatures, words: int) -> TextFeatures:
        """Encode N captions to W positions each; features from a store are returned unchanged.

        Args:
            text: N captions, their token ids as `caption_tokens` makes them, or their features.
            words: token positions asked for, SOT and EOT included; W is the smaller of it and `context_length`.

        Returns:
            Features with sentence (N, D), words (N, W, D) and word_mask (N, W).

        Raises:
            ValueError: `words` is below 3.
        """
        if isinstance(text, TextFeatures):
            return text
        words = self.positions(words)
        return self.encode_tokenised(text, words) if isinstance(text, Tokens) else self.encode_captions(text, words)

    def caption_tokens(self, words: int) -> Callable[[list[str]], Tokens] | None:
        """Return what tokenises captions in worker processes, so it must pickle; None where strings are awaited.

        Args:
            words: token positions asked for, as in `encode_text`.
        """
        return None

    def positions(self, words: int) -> int:
        """Return W, the token positions that a caption gets where `words` are asked for; said once where it is less."""
        if words > self.context_length and not self._said_fewer:
            self._said_fewer = True
            rank_zero_info(
                f"words is {words}, but {getattr(self, 'name', type(self).__name__)} has a context length of "
                f"{self.context_length}. Captions are truncated to it."
            )
        return min(words, self.context_length)

    def encode_video(self, video: Media | VideoFeatures, patches: bool = False) -> VideoFeatures:
        """Encode the frames of M videos; features from a store are returned unchanged.

        Args:
            video: media with pixels (M, F, 3, S, S) from 0 to 255, or features.
            patches: whether the (M, F, P, D) patch vectors are wanted besides the frame vectors.

        Returns:
            Features with frames (M, F, D), frame_mask (M, F) and, on demand, patches.

        Raises:
            ValueError: frames of another size than S, or patches wanted that the store or the architecture lacks.
        """
        if not isinstance(video, VideoFeatures):
            return self.encode_media(video, patches)
        if patches and video.patches is None:
            raise ValueError("The stored features contain no patches. Extract them again with patches.")
        return video

    @abstractmethod
    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        """Encode N caption strings: the part of `encode_text` that computes."""

    def encode_tokenised(self, tokens: Tokens, words: int) -> TextFeatures:
        """Encode N captions that `caption_tokens` tokenised: the features of `encode_captions`, which it calls here."""
        return self.encode_captions(tokens.captions, words)

    @abstractmethod
    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        """Encode decoded media of M videos: the part of `encode_video` that computes."""

    @abstractmethod
    def temporal_initialization(self, layers: int) -> TemporalInitialization | None:
        """State for a temporal transformer of `layers` blocks; None where the architecture has nothing that fits."""

    @abstractmethod
    def initial_logit_scale(self) -> float:
        """Logarithm of the temperature factor in the weights: ln 100 in OpenAI's, ln(1/0.07) in random ones."""

    def initial_logit_bias(self) -> float:
        """What the weights add to every logit, as those trained with a sigmoid do (SigLIP); 0 in all others."""
        return 0.0

    @abstractmethod
    def freeze(self, rule: FreezeRule) -> None:
        """Say which parameters train; each call starts anew."""

    @abstractmethod
    def configuration(self) -> dict[str, object]:
        """Everything besides the weights that changes the features: architecture, preprocessing, switches."""

    @classmethod
    def check_trainer(cls, precision: str, strategy: str, **options: Any) -> None:
        """Refuse a Trainer precision or strategy that the encoder cannot train under; nothing is built or read.

        Args:
            precision: Lightning's name, such as `32-true` or `bf16-mixed`.
            strategy: Lightning's name, such as `ddp` or `ModelParallelStrategy`.
            options: Options of the constructor, as recipes give them.

        Raises:
            ValueError: The combination cannot work.
        """

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of `configuration()` and all weights: another value whenever either changes.

        Sharded weights are gathered, so every rank must call it.
        """
        return fingerprint(self.configuration(), self)
