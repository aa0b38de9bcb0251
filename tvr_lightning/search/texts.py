"""Texts that a video is described by, encoded block by block and once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from tvr_lightning.features import TextFeatures
from tvr_lightning.search.errors import GivenUpError
from tvr_lightning.search.scorer import Scorer

TEXTS_AT_ONCE = 64
"""Texts per pass through the encoder: few enough that memory stays small and whoever gives up is heard soon."""

KEPT_BYTES = 128 * 2**20
"""Of encoded texts, which are kept for whoever asks next; what lies beyond is encoded anew for each."""

GivenUp = Callable[[], bool]
"""Says whether nobody waits for the answer any more."""


def never() -> bool:
    """Say that somebody waits for the answer."""
    return False


class EncodedTexts:
    """Features of texts; several threads may walk over the blocks at once, and each block is encoded by one of them.

    Of any number of texts no more than `KEPT_BYTES` stay in memory.

    Args:
        scorer: encodes them.
        texts: N strings.
    """

    def __init__(self, scorer: Scorer, texts: list[str]) -> None:
        self.scorer, self.texts = scorer, texts
        self._done: list[TextFeatures] = []
        self._bytes = 0
        self._lock = threading.Lock()

    def blocks(self, given_up: GivenUp = never) -> Iterator[TextFeatures]:
        """Give the features of all texts in their order, `TEXTS_AT_ONCE` at a time; what is encoded stays.

        Raises:
            GivenUpError: nobody waits for the answer any more; blocks that are encoded stay for whoever asks next.
        """
        for place, start in enumerate(range(0, len(self.texts), TEXTS_AT_ONCE)):
            texts = self.texts[start : start + TEXTS_AT_ONCE]
            while place >= len(self._done) and self._bytes < KEPT_BYTES:
                self._encode(place, texts, given_up)
            if given_up():
                raise GivenUpError("no client is waiting for the texts")
            yield self._done[place] if place < len(self._done) else self.scorer.encode_texts(texts)

    def _encode(self, place: int, texts: list[str], given_up: GivenUp) -> None:
        """Encode a block unless another thread has done so; wait for that thread no longer than somebody waits."""
        if given_up():
            raise GivenUpError("no client is waiting for the texts")
        if not self._lock.acquire(timeout=0.2):
            return
        try:
            if place == len(self._done):
                features = self.scorer.encode_texts(texts)
                self._bytes += sum(value.nbytes for _, value in features._fields() if value is not None)
                self._done.append(features)
        finally:
            self._lock.release()
