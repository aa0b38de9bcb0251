"""What a server or a search asks: one index of this machine, one that another server has, or several of both."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.examples import unpack
from tvr_lightning.search.filters import Filter
from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Answer, Normalize
from tvr_lightning.search.texts import GivenUp, never

ExampleKind = Literal["clip", "picture"]


class UnansweredError(SearchError):
    """An index does not answer; says which one and why."""


class SlowError(UnansweredError):
    """An index takes longer to answer than it may."""


@dataclass(frozen=True)
class SearchRequest:
    """One search, as `Searcher.search` takes it.

    Attributes:
        query: what is to be seen; may be empty beside examples.
        top: how many results.
        rerank: scorer of the second stage, "none" for the first stage's order, None for the index's first scorer.
        candidates: how many stretches the second stage scores.
        normalize: "sinkhorn" keeps hubs from crowding the results.
        only: which videos may be found.
        threshold: relevance that results have at least.
        without: what is not to be seen.
        like: what results look like.
        unlike: what they do not look like.
        evidence: whether the answer says what it is compared by with those of other indexes.
    """

    query: str = ""
    top: int = 10
    rerank: str | None = None
    candidates: int = 256
    normalize: Normalize = "none"
    only: Filter | None = None
    threshold: float | None = None
    without: str = ""
    like: Sequence[Example] = ()
    unlike: Sequence[Example] = ()
    evidence: bool = False


@dataclass(frozen=True)
class Passed:
    """A file that another server hands out.

    Attributes:
        status: 200, 206 or 416.
        headers: of the answer that players read.
        chunks: of the body; closed once nobody reads on.
    """

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]


class Source(contextlib.AbstractContextManager["Source"], abc.ABC):
    """Answers what the API asks.

    Attributes:
        name: what it is called where several are asked.
    """

    name: str

    def __exit__(self, *_: object) -> None:
        """Let go of files and threads."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of files and threads."""

    @abc.abstractmethod
    def ready(self) -> None:
        """Check that requests are answered.

        Raises:
            SearchError: they are not.
        """

    @abc.abstractmethod
    def count(self) -> int:
        """Return how many videos there are, as far as this machine knows."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what is indexed and which scorers there are, as `/api/index` says it."""

    @abc.abstractmethod
    def search(self, asked: SearchRequest) -> Answer:
        """Answer a search.

        Raises:
            SearchError: the request cannot be served.
        """

    @abc.abstractmethod
    def read(self, path: Path, kind: ExampleKind, name: str) -> Example:
        """Read a file as an example.

        Raises:
            MediaError: it cannot be decoded.
        """

    def accept(self, content: bytes, name: str) -> Example:
        """Return an example that came as features.

        Raises:
            SearchError: it is none, or one of another encoder.
        """
        return unpack(content, name)

    @abc.abstractmethod
    def example(self, video: str) -> Example:
        """Return a video as an example.

        Raises:
            UnknownVideoError: no such video.
        """

    @abc.abstractmethod
    def library(self, only: Filter, top: int, after: int) -> dict[str, Any]:
        """List videos, as `/api/videos` does."""

    @abc.abstractmethod
    def facets(self) -> dict[str, Any]:
        """Count videos by folder and by length, as `/api/facets` does."""

    @abc.abstractmethod
    def about(self, video: str) -> dict[str, Any]:
        """Say what is known of one video.

        Raises:
            UnknownVideoError: no such video.
        """

    @abc.abstractmethod
    def file(self, video: str, wanted: Mapping[str, str]) -> Path | Passed:
        """Return the video itself.

        Args:
            video: its id.
            wanted: headers of the request that say which bytes.

        Raises:
            UnknownVideoError: no such video.
            SearchError: it may not be handed out.
        """

    @abc.abstractmethod
    def picture(self, video: str, time: float) -> bytes:
        """Return the indexed frame nearest to a time as JPEG.

        Raises:
            UnknownVideoError: no such video, or none of its pictures.
        """

    @abc.abstractmethod
    def texts(self, video: str, top: int, given_up: GivenUp = never) -> list[dict[str, Any]]:
        """Return the texts that fit a video, best first.

        Raises:
            SearchError: there are no texts.
            UnknownVideoError: no such video.
            GivenUpError: `given_up` said yes.
        """
