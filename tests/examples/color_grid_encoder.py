"""ColorGridEncoder: a convolution over frames and hashed words, as an example of an encoder."""

from __future__ import annotations

import math
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.base import Encoder
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import do_weights_follow
from tvr_lightning.features import TextFeatures, VideoFeatures

PAD, START, END = range(3)


class HashTokenizer:
    """Tokenizer that returns `[START] words [END]`, (N, W) int64, padded with `PAD`; word IDs are checksums.

    Args:
        buckets: Number of word IDs.
    """

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.vocabulary_size = END + 1 + buckets

    def __call__(self, captions: list[str], words: int) -> Tensor:
        """Tokenize N captions to W = `words` positions; longer captions are cut before `END`."""
        ids = torch.full((len(captions), words), PAD)
        for row, caption in enumerate(captions):
            found = [self.word_id(word) for word in self.words_of(caption)[: words - 2]]
            line = [START, *found, END]
            ids[row, : len(line)] = torch.tensor(line)
        return ids

    def needed(self, caption: str) -> int:
        """Return the number of positions of a caption; search reports queries that are cut."""
        return len(self.words_of(caption)) + 2

    def words_of(self, caption: str) -> list[str]:
        """Return the words of a caption, in lower case and without punctuation."""
        return re.findall(r"\w+", caption.lower())

    def word_id(self, word: str) -> int:
        """Return the ID of a word, equal in all processes (unlike Python's `hash`)."""
        return END + 1 + zlib.crc32(word.encode()) % self.buckets


class ColorGridEncoder(Encoder):
    """Encoder of frames as grids of cells and of captions as bags of words; small enough to train on one CPU core.

    Args:
        dimension: Dimension D of all vectors.
        image_size: Frame size in pixels, a multiple of `cell`.
        cell: Cell size in pixels; cells are the patches.
        buckets: Number of word IDs.
        context_length: Maximum number of positions of a text.
        weights: File written by `torch.save(encoder.state_dict(), ...)`, or None for random weights.

    Raises:
        MissingWeightsError: The file does not exist.
        ValueError: `image_size` is not a multiple of `cell`.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        dimension: int = 64,
        image_size: int = 64,
        cell: int = 8,
        buckets: int = 2048,
        context_length: int = 77,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        if image_size % cell:
            raise ValueError(f"ColorGridEncoder.image_size {image_size} must be a multiple of cell {cell}")
        self.dimension, self.image_size, self.context_length = dimension, image_size, context_length
        self.tokenizer = HashTokenizer(buckets)
        self.embedding = nn.Embedding(self.tokenizer.vocabulary_size, dimension, padding_idx=PAD)
        self.word_layer = nn.Linear(dimension, dimension)
        self.sentence_layer = nn.Linear(dimension, dimension)
        self.cell_layer = nn.Conv2d(3, dimension, kernel_size=cell, stride=cell)
        self.place = nn.Parameter(0.02 * torch.randn((image_size // cell) ** 2, dimension))
        self.patch_layer = nn.Linear(dimension, dimension)
        self.frame_layer = nn.Linear(dimension, dimension)
        # Not persistent, since they are part of `configuration` instead of the weights.
        self.register_buffer("pixel_mean", torch.full((3, 1, 1), 0.5), persistent=False)
        self.register_buffer("pixel_std", torch.full((3, 1, 1), 0.25), persistent=False)
        for path in self.required_files(weights=weights):
            self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    @classmethod
    def required_files(cls, *, weights: str | None = None, **options: Any) -> list[Path]:
        """Return the weights file; empty if a checkpoint provides the weights."""
        if weights is None or do_weights_follow():
            return []
        path = Path(weights)
        if not path.is_file():
            raise MissingWeightsError(f"ColorGridEncoder.weights: looked for {path.absolute()}; name a file, or null")
        return [path]

    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        """Return the words (N, W, D) of N captions and a sentence vector from their mean, (N, D)."""
        if not 3 <= words <= self.context_length:
            raise ValueError(f"words is {words}; it must be between 3 and {self.context_length}")
        ids = self.tokenizer(captions, words).to(self.pixel_mean.device)
        mask = ids != PAD
        vectors = nn.functional.gelu(self.word_layer(self.embedding(ids)))
        there = mask.unsqueeze(-1).to(vectors.dtype)
        mean = (vectors * there).sum(1) / there.sum(1)
        return TextFeatures(self.sentence_layer(mean).float(), vectors.float(), mask)

    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        """Return the frames (M, F, D) of M videos and, if requested, their cells (M, F, P, D)."""
        pixels = media.pixels.to(self.pixel_mean.device, non_blocking=True)
        if pixels.shape[2:] != (3, self.image_size, self.image_size):
            raise ValueError(f"frames are {tuple(pixels.shape[2:])}, the encoder takes (3, {self.image_size}, ...)")
        normalized = (pixels.to(self.pixel_mean.dtype) / 255 - self.pixel_mean) / self.pixel_std
        cells = self.cell_layer(normalized.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
        seen = nn.functional.gelu(self.patch_layer(nn.functional.gelu(cells)))  # (M F, P, D)
        frames = self.frame_layer(seen.mean(1)).float().unflatten(0, pixels.shape[:2])
        every = seen.float().unflatten(0, pixels.shape[:2]) if patches else None
        return VideoFeatures(frames, media.frame_mask.to(pixels.device).bool(), every)

    def initial_logit_scale(self) -> float:
        """Return ln(1/0.07), CLIP's initial value."""
        return math.log(1 / 0.07)

    def configuration(self) -> dict[str, object]:
        """Return all settings that change features, except those visible in the shapes of weights."""
        return {
            "image_size": self.image_size,
            "mean": self.pixel_mean.flatten().tolist(),
            "std": self.pixel_std.flatten().tolist(),
            "words": "crc32 of lower-case words",
        }
