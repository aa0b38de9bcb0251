"""Tokenization of captions, with the truncation and padding of the retrieval papers; CLIP's byte-pair encoding."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import lru_cache

import regex as re
import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor
from typing_extensions import override

from tvr_lightning.data.batch import Tokens
from tvr_lightning.errors import UserError

logger = logging.getLogger(__name__)

OPENAI_SPECIAL = ("<|startoftext|>", "<|endoftext|>")


class Tokenizer(ABC):
    """Base class of tokenizers that map captions to token ids (N, W), with padding at the end.

    Args:
        context_length: maximum number of positions of the text transformer.

    Attributes:
        pad_id: ID that fills the positions after a caption.
        blank_end: 1 if one position after the caption must contain padding (CLIPA), otherwise 0.
        vocabulary_size: Number of token ids.
    """

    pad_id: int = 0
    blank_end: int = 0
    vocabulary_size: int

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self._reported = False

    @abstractmethod
    def tokens(self, caption: str, words: int | None = None) -> list[int]:
        """Return the ids of a caption with start and end, of which at most `words`; the end is never dropped."""

    @abstractmethod
    def piece(self, token: int) -> str:
        """Return the text of a token."""

    @abstractmethod
    def describe(self) -> str:
        """Return a short description of vocabulary and cleaning, for fingerprints of stored features."""

    def encode(self, captions: list[str], words: int) -> Tokens:
        """Tokenize N captions to `words` positions W, dropping the last tokens before the end of longer captions.

        Raises:
            UserError: `words` is below 3 (too short for a token) or above the context length, or a caption is not a
                string.
        """
        if not 3 <= words <= self.context_length:
            raise UserError(
                f"words is {words}; it must be between 3 (SOT, one token, EOT) and the encoder's context length "
                f"{self.context_length}"
            )
        lines, needed = [], []
        for row, caption in enumerate(captions):
            if not isinstance(caption, str):
                raise UserError(f"caption {row} of the batch is {caption!r}, a {type(caption).__name__}; expected text")
            line = self.tokens(caption)
            needed.append(len(line) + self.blank_end)
            lines.append(line if needed[-1] <= words else self.tokens(caption, words))
        padded = [line + [self.pad_id] * (words - len(line)) for line in lines]
        lengths = torch.tensor([len(line) for line in lines], dtype=torch.int64)
        ids = torch.tensor(padded, dtype=torch.int64).reshape(len(captions), words)
        return Tokens(list(captions), ids, torch.arange(words) < lengths[:, None], needed)

    def __call__(self, captions: list[str], words: int) -> Tensor:
        """Return only the ids (N, W) of `encode`."""
        return self.encode(captions, words).ids

    def report_truncated(self, tokens: Tokens) -> None:
        """Log the first truncated caption; the results table states how many texts of a test are truncated."""
        words = tokens.ids.shape[1]
        for caption, needed in zip(tokens.captions, tokens.needed, strict=True):
            if needed > words and not self._reported:
                self._reported = True
                logger.warning(
                    "A caption needs %d token positions and is truncated to %d before EOT: %r. Others are not "
                    "reported.",
                    needed,
                    words,
                    caption,
                )

    def needed(self, caption: str) -> int:
        """Return the number of positions that a caption needs, including start and end."""
        return len(self.tokens(caption)) + self.blank_end

    def pieces(self, caption: str, words: int) -> list[str]:
        """Return the text of each of the W = `words` positions of a caption, without padding."""
        return [self.piece(token) for token in self.tokens(caption, words)]


@lru_cache
def _byte_pairs(clean: str) -> SimpleTokenizer:
    """Return CLIP's byte-pair encoding for a kind of cleaning; cached, since loading takes a quarter of a second."""
    tokenizer = SimpleTokenizer(clean=clean)
    # The released tokenizers recognize OpenAI's names of the special tokens in a caption, not open_clip's.
    pattern = tokenizer.pat.pattern
    for name, own in zip(OPENAI_SPECIAL, ("<start_of_text>", "<end_of_text>"), strict=True):
        tokenizer.encoder[name] = tokenizer.encoder[own]
        pattern = pattern.replace(own, re.escape(name))
    tokenizer.pat = re.compile(pattern, tokenizer.pat.flags)
    tokenizer.cache = {name: name for name in OPENAI_SPECIAL}
    return tokenizer


class ClipTokenizer(Tokenizer):
    """CLIP's byte-pair encoding, `[SOT] tokens [EOT]`, zero-padded; text is cleaned and lower-cased as in CLIP.

    The padding ID 0 is also the ID of the token "!", so masks are based on the position of EOT and not on the ids
    (CLIP4Clip, dataloaders/dataloader_msrvtt_retrieval.py). EOT is the largest ID.

    Args:
        context_length: maximum number of positions of the text transformer.
        clean: open_clip's name of the cleaning, `lower` for CLIP.
    """

    def __init__(self, context_length: int, clean: str = "lower"):
        super().__init__(context_length)
        self.clean = clean
        self._bpe = _byte_pairs(clean)
        self.vocabulary_size = self._bpe.vocab_size

    @override
    def tokens(self, caption: str, words: int | None = None) -> list[int]:
        inner = self._bpe.encode(caption)
        return [self._bpe.sot_token_id, *(inner if words is None else inner[: words - 2]), self._bpe.eot_token_id]

    @override
    def piece(self, token: int) -> str:
        return str(self._bpe.decode([token]).strip())

    @override
    def describe(self) -> str:
        return "CLIP byte pairs" if self.clean == "lower" else f"CLIP byte pairs, {self.clean}"


def word_mask(ids: Tensor) -> Tensor:
    """Return the mask (N, W) bool up to and including EOT, the largest ID of CLIP's vocabulary, for ids (N, W)."""
    return torch.arange(ids.shape[1], device=ids.device) <= ids.argmax(dim=-1, keepdim=True)
