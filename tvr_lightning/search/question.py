"""One search of `tvr search`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.results import Answer, Normalize

if TYPE_CHECKING:
    from tvr_lightning.search.local import LocalIndex


@dataclass(frozen=True)
class Question:
    """One search, in words, by examples, or by both.

    Attributes:
        query: what is to be seen; may be empty with an example.
        video: absolute path of an example, or of several.
        top: how many results.
        rerank: scorer of the second stage, "none" for the first stage's order, None for the index's first scorer.
        candidates: how many videos the second stage scores.
        normalize: "sinkhorn" keeps hubs from crowding the results.
        folder: Folder whose videos may be found, relative to an indexed one.
        threshold: relevance that results have at least; None keeps all.
        picture: absolute path of a picture as an example, or of several.
        without: what is not to be seen.

    Raises:
        SearchError: an example with options of words, or neither.
    """

    query: str
    video: str | Sequence[str] | None = None
    top: int = 10
    rerank: str | None = None
    candidates: int = 256
    normalize: Normalize = "none"
    folder: str | None = None
    threshold: float | None = None
    picture: str | Sequence[str] | None = None
    without: str = ""

    def __post_init__(self) -> None:
        if self.query or not (self.video or self.picture):
            return
        if self.rerank is not None or self.normalize != "none" or self.threshold is not None:
            raise SearchError("Examples are compared frame by frame. Drop --rerank, --normalize, and --min_relevance.")

    def ask(self, source: LocalIndex) -> Answer:
        """Return what an index answers.

        Raises:
            SearchError: an empty query, or an option that the index cannot serve.
            VideoError: an example cannot be decoded.
            PictureError: likewise.
        """
        from tvr_lightning.search.source import SearchRequest

        like = [source.read(Path(path), "clip", Path(path).name) for path in _several(self.video)]
        like += [source.read(Path(path), "picture", Path(path).name) for path in _several(self.picture)]
        return source.search(
            SearchRequest(
                self.query,
                self.top,
                self.rerank,
                self.candidates,
                self.normalize,
                self.folder,
                self.threshold,
                self.without,
                like,
            )
        )


def _several(given: str | Sequence[str] | None) -> Sequence[str]:
    return [given] if isinstance(given, str) else given or []
