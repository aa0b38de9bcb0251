"""What `tvr search` asks: of an index that it opens, or of a server that has it open."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.results import Answer, Normalize

if TYPE_CHECKING:
    from tvr_lightning.search.engine import Searcher


@dataclass(frozen=True)
class Question:
    """One search, in words or by an example.

    Attributes:
        query: what is to be seen; empty with an example.
        video: absolute path of an example in place of words.
        top: how many results.
        rerank: scorer of the second stage, "none" for the first stage's order, None for the index's first scorer.
        candidates: how many videos the second stage scores.
        normalize: "sinkhorn" keeps hubs from crowding the results.
        shortest: seconds that a video lasts at least.
        longest: seconds that it lasts at most.
        path: what its path contains.
        caption: words that its captions contain.

    Raises:
        SearchError: words and an example, or an example with options of words.
    """

    query: str
    video: str | None = None
    top: int = 10
    rerank: str | None = None
    candidates: int = 256
    normalize: Normalize = "none"
    shortest: float | None = None
    longest: float | None = None
    path: str | None = None
    caption: str | None = None

    def __post_init__(self) -> None:
        if self.video is None:
            return
        if self.query:
            raise SearchError("give words or --video, not both")
        if self.rerank is not None or self.normalize != "none":
            raise SearchError("--video compares frames with frames; drop --rerank and --normalize")

    def plain(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    def ask(self, searcher: Searcher) -> Answer:
        """Return what an open index answers.

        Raises:
            SearchError: an empty query, or an option that the index cannot serve.
            VideoError: the example cannot be decoded.
        """
        from tvr_lightning.search.engine import Filter

        wanted = Filter(self.shortest, self.longest, self.path, self.caption)
        only = None if wanted == Filter() else wanted
        if self.video is not None:
            return searcher.search_video(self.video, self.top, only)
        return searcher.search(self.query, self.top, self.rerank, self.candidates, self.normalize, only)
