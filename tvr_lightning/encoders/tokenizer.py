"""CLIP's byte-pair tokeniser, cut and padded as the retrieval papers do it."""

from __future__ import annotations

import logging

import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

logger = logging.getLogger(__name__)


class ClipTokenizer:
    """Captions to `[SOT] tokens [EOT]`, (N, W) int64, zero-padded; text is cleaned and lower-cased as CLIP does.

    The pad id 0 is also the id of the token "!", so that the mask comes from the position of EOT and not from the ids
    (CLIP4Clip, dataloaders/dataloader_msrvtt_retrieval.py).

    Args:
        context_length: most positions that the text transformer has.
        clean: open_clip's name of the cleaning, `lower` for CLIP.

    Attributes:
        vocabulary_size: number of token ids; EOT is the largest.
        truncated_captions: number of captions that were cut so far.
    """

    def __init__(self, context_length: int, clean: str = "lower"):
        self.context_length, self.clean = context_length, clean
        self.truncated_captions = 0
        self._bpe = SimpleTokenizer(context_length=context_length, clean=clean)
        self.vocabulary_size: int = self._bpe.vocab_size

    def __call__(self, captions: list[str], words: int) -> Tensor:
        """Tokenise N captions.

        A caption that needs more than `words` positions loses its last tokens before EOT; it is counted, and the first
        one is reported.

        Args:
            captions: N strings.
            words: W, positions including SOT and EOT.

        Returns:
            (N, W) int64 token ids.

        Raises:
            ValueError: `words` is below 3 (no room for a token) or above the context length.
            TypeError: a caption is not a string.
        """
        if not 3 <= words <= self.context_length:
            raise ValueError(
                f"words is {words}; it must lie between 3 (SOT, one token, EOT) and the encoder's context length "
                f"{self.context_length}"
            )
        ids = torch.zeros(len(captions), words, dtype=torch.int64)
        for row, caption in enumerate(captions):
            if not isinstance(caption, str):
                raise TypeError(f"caption {row} of the batch is {caption!r}, a {type(caption).__name__}; expected text")
            tokens = self._bpe.encode(caption)
            if len(tokens) > words - 2:
                self._count_truncated(caption, len(tokens) + 2, words)
                tokens = tokens[: words - 2]
            line = [self._bpe.sot_token_id, *tokens, self._bpe.eot_token_id]
            ids[row, : len(line)] = torch.tensor(line)
        return ids

    def needed(self, caption: str) -> int:
        """Return how many positions a caption needs, SOT and EOT included."""
        return len(self._bpe.encode(caption)) + 2

    def pieces(self, caption: str, words: int) -> list[str]:
        """Return the text of each of the W positions of a caption, padding left out: SOT, tokens, EOT.

        Args:
            caption: any string.
            words: W.
        """
        ids = self([caption], words)[0]
        return [self._bpe.decode([token]).strip() for token in ids[word_mask(ids.unsqueeze(0))[0]].tolist()]

    def _count_truncated(self, caption: str, needed: int, words: int) -> None:
        self.truncated_captions += 1
        if self.truncated_captions == 1:
            logger.warning(
                "a caption needs %d token positions and is cut to %d before EOT: %r. Further ones are only counted "
                "(truncated_captions).",
                needed,
                words,
                caption,
            )


def word_mask(ids: Tensor) -> Tensor:
    """Mask of the positions up to and including EOT, which has the largest id of a vocabulary.

    Args:
        ids: (N, W) token ids.

    Returns:
        (N, W) bool.
    """
    return torch.arange(ids.shape[1], device=ids.device) <= ids.argmax(dim=-1, keepdim=True)
