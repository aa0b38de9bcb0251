"""ColourGridEncoder: a convolution over every frame and hashed words, as an example of an encoder."""

from __future__ import annotations

import math
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders.base import Encoder, FreezeRule, TemporalInitialization
from tvr_lightning.encoders.hub import MissingWeightsError
from tvr_lightning.encoders.pretrained import do_weights_follow
from tvr_lightning.features import TextFeatures, VideoFeatures

PAD, START, END = range(3)


class HashTokenizer:
    """Captions to `[START] words [END]`, (N, W) int64, padded with `PAD`; a word's id is a checksum of its letters.

    Args:
        buckets: how many ids words share.
    """

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self.vocabulary_size = END + 1 + buckets

    def __call__(self, captions: list[str], words: int) -> Tensor:
        """Tokenise N captions to W = `words` positions; what does not fit is cut before `END`."""
        ids = torch.full((len(captions), words), PAD)
        for row, caption in enumerate(captions):
            found = [self.word_id(word) for word in self.words_of(caption)[: words - 2]]
            line = [START, *found, END]
            ids[row, : len(line)] = torch.tensor(line)
        return ids

    def needed(self, caption: str) -> int:
        """Return how many positions a caption needs; searches say of a longer query that it is cut."""
        return len(self.words_of(caption)) + 2

    def words_of(self, caption: str) -> list[str]:
        """Return the words of a caption, in lower case and without punctuation."""
        return re.findall(r"\w+", caption.lower())

    def word_id(self, word: str) -> int:
        """Return the id of a word, the same in every process, which Python's `hash` is not."""
        return END + 1 + zlib.crc32(word.encode()) % self.buckets


class ColourGridEncoder(Encoder):
    """Frames as grids of cells, captions as bags of words: small enough to learn from nothing on one processor core.

    Args:
        dimension: D.
        image_size: side of the frames in pixels, a multiple of `cell`.
        cell: side of a cell in pixels; cells are the patches.
        buckets: how many ids words share.
        context_length: most positions of a text.
        freeze: `none` trains everything, `all` nothing.
        weights: file that `torch.save(encoder.state_dict(), ...)` wrote; None for random ones.

    Raises:
        MissingWeightsError: there is no such file.
        ValueError: `image_size` is no multiple, or an unknown rule.
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
        freeze: FreezeRule = "none",
        weights: str | None = None,
    ) -> None:
        super().__init__()
        if image_size % cell:
            raise ValueError(f"ColourGridEncoder.image_size {image_size} is no multiple of cell {cell}")
        self.dimension, self.image_size, self.context_length = dimension, image_size, context_length
        self.tokenizer = HashTokenizer(buckets)
        self.embedding = nn.Embedding(self.tokenizer.vocabulary_size, dimension, padding_idx=PAD)
        self.word_layer = nn.Linear(dimension, dimension)
        self.sentence_layer = nn.Linear(dimension, dimension)
        self.cell_layer = nn.Conv2d(3, dimension, kernel_size=cell, stride=cell)
        self.place = nn.Parameter(0.02 * torch.randn((image_size // cell) ** 2, dimension))
        self.patch_layer = nn.Linear(dimension, dimension)
        self.frame_layer = nn.Linear(dimension, dimension)
        # Not persistent: they are no weights, `configuration` names them.
        self.register_buffer("pixel_mean", torch.full((3, 1, 1), 0.5), persistent=False)
        self.register_buffer("pixel_std", torch.full((3, 1, 1), 0.25), persistent=False)
        for path in self.required_files(weights=weights):
            self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        self.freeze(freeze)

    @classmethod
    def required_files(cls, *, weights: str | None = None, **options: Any) -> list[Path]:
        """Return the file of the weights; none where a checkpoint brings them."""
        if weights is None or do_weights_follow():
            return []
        path = Path(weights)
        if not path.is_file():
            raise MissingWeightsError(f"ColourGridEncoder.weights: looked for {path.absolute()}; name a file, or null")
        return [path]

    def encode_captions(self, captions: list[str], words: int) -> TextFeatures:
        """Encode N captions: words (N, W, D), and the mean of those that are there, (N, D)."""
        if not 3 <= words <= self.context_length:
            raise ValueError(f"words is {words}; it must lie between 3 and {self.context_length}")
        ids = self.tokenizer(captions, words).to(self.pixel_mean.device)
        mask = ids != PAD
        vectors = nn.functional.gelu(self.word_layer(self.embedding(ids)))
        there = mask.unsqueeze(-1).to(vectors.dtype)
        mean = (vectors * there).sum(1) / there.sum(1)
        return TextFeatures(self.sentence_layer(mean).float(), vectors.float(), mask)

    def encode_media(self, media: Media, patches: bool = False) -> VideoFeatures:
        """Encode M videos: frames (M, F, D), and on demand the cells of each, (M, F, P, D)."""
        pixels = media.pixels.to(self.pixel_mean.device, non_blocking=True)
        if pixels.shape[2:] != (3, self.image_size, self.image_size):
            raise ValueError(f"frames are {tuple(pixels.shape[2:])}, the encoder takes (3, {self.image_size}, ...)")
        normalised = (pixels.to(self.pixel_mean.dtype) / 255 - self.pixel_mean) / self.pixel_std
        cells = self.cell_layer(normalised.flatten(0, 1)).flatten(2).transpose(1, 2) + self.place
        seen = nn.functional.gelu(self.patch_layer(nn.functional.gelu(cells)))  # (M F, P, D)
        frames = self.frame_layer(seen.mean(1)).float().unflatten(0, pixels.shape[:2])
        every = seen.float().unflatten(0, pixels.shape[:2]) if patches else None
        return VideoFeatures(frames, media.frame_mask.to(pixels.device).bool(), every)

    def temporal_initialization(self, layers: int) -> TemporalInitialization | None:
        """None: there is no text transformer that a temporal one could start from."""
        return None

    def initial_logit_scale(self) -> float:
        """ln(1/0.07), CLIP's before training."""
        return math.log(1 / 0.07)

    def freeze(self, rule: FreezeRule) -> None:
        """Train everything or nothing; each call starts anew."""
        if rule not in ("none", "all"):
            raise ValueError(f"freeze is {rule!r}; ColourGridEncoder knows none and all")
        self.requires_grad_(rule == "none")

    def configuration(self) -> dict[str, object]:
        """What changes features besides weights, whose shapes say the rest."""
        return {
            "image_size": self.image_size,
            "mean": self.pixel_mean.flatten().tolist(),
            "std": self.pixel_std.flatten().tolist(),
            "words": "crc32 of lower-case words",
        }
