"""One search of `tvr search`."""

from __future__ import annotations

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
        video: Example clip.
        top: how many results.
        rerank: scorer of the second stage, "none" for the first stage's order, None for the index's first scorer.
        candidates: how many videos the second stage scores.
        normalize: "sinkhorn" keeps hubs from crowding the results.
        folder: Folder whose videos may be found, relative to an indexed one.
        threshold: relevance that results have at least; None keeps all.
        image: Example image.

    Raises:
        SearchError: an example with options of words, or neither.
    """

    query: str
    video: Path | None = None
    top: int = 10
    rerank: str | None = None
    candidates: int = 256
    normalize: Normalize = "none"
    folder: str | None = None
    threshold: float | None = None
    image: Path | None = None

    def __post_init__(self) -> None:
        if self.video and self.image:
            raise SearchError("Use one example, either --video or --image.")
        if self.query or not (self.video or self.image):
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

        path = self.video or self.image
        like = None if path is None else source.read(path, "clip" if self.video else "picture", path.name)
        return source.search(
            SearchRequest(
                self.query,
                self.top,
                self.rerank,
                self.candidates,
                self.normalize,
                self.folder,
                self.threshold,
                like,
            )
        )
