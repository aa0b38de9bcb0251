"""An index that this process has open, as the API answers from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.files import resolve_roots
from tvr_lightning.search.places import handed_out, remembered
from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Answer
from tvr_lightning.search.source import ExampleKind, SearchRequest
from tvr_lightning.search.texts import GivenUp, never

PREVIEWS = 12
"""Pictures of a video that are shown one after another."""


class LocalIndex:
    """One index.

    Args:
        searcher: answers.
        videos: files and folders whose videos may be handed out; none for those that this user indexed here.
        public: whether paths are told below the indexed folders only.
    """

    def __init__(self, searcher: Searcher, videos: Sequence[Path] = (), public: bool = True) -> None:
        self.searcher, self.videos, self.public = searcher, tuple(videos), public

    @property
    def handed_out(self) -> list[Path]:
        """Files and folders whose videos may be handed out; what the index says of itself does not count."""
        return resolve_roots(self.videos) if self.videos else remembered(self.searcher.catalog).roots

    def ready(self) -> None:
        """Check that the index can be read.

        Raises:
            SearchError: it cannot.
        """
        self.searcher.catalog.fact("version")

    def count(self) -> int:
        """Return how many videos there are."""
        return self.searcher.catalog.count()

    def state(self) -> dict[str, Any]:
        """Return what is indexed and which scorers there are."""
        searcher = self.searcher
        return {
            "videos": searcher.catalog.count(),
            "scorers": list(searcher.scorers),
            "normalize": ["none", "sinkhorn"] if searcher.catalog.fact("bank") else ["none"],
            "folders": searcher.folders(),
            "examples": searcher.example_queries(),
            "skipped": len(searcher.catalog.skipped()),
            "store": searcher.store.partition("://")[0],
        }

    def search(self, asked: SearchRequest) -> Answer:
        """Answer a search.

        Raises:
            SearchError: the request cannot be served.
        """
        searcher = self.searcher
        answer = searcher.search(
            asked.query,
            asked.top,
            asked.rerank,
            asked.candidates,
            asked.normalize,
            asked.folder,
            asked.threshold,
            like=asked.like,
        )
        if self.public:
            for result in answer.results:
                result.path = self._shown(Path(result.path))
        return answer

    def read(self, path: Path, kind: ExampleKind, name: str) -> Example:
        """Read a file as an example.

        Raises:
            MediaError: it cannot be decoded.
        """
        read = self.searcher.read_example if kind == "clip" else self.searcher.read_picture_example
        return Example(name, read(path))

    def example(self, video: str) -> Example:
        """Return a video as an example.

        Raises:
            UnknownVideoError: no such video.
        """
        return self.searcher.example(video)

    def library(self, folder: str | None, top: int, after: int) -> dict[str, Any]:
        """List videos, the latest first."""
        rows, count = self.searcher.catalog.listed(folder, top, after)
        videos = [
            {
                "id": row.id,
                "path": self._shown(row.path),
                "duration": row.duration,
                "width": row.width,
                "height": row.height,
            }
            for row in rows
        ]
        return {"videos": videos, "count": count}

    def about(self, video: str) -> dict[str, Any]:
        """Say what is known of one video.

        Raises:
            UnknownVideoError: no such video.
        """
        catalog = self.searcher.catalog
        row = catalog.video(video)
        return {
            "id": row.id,
            "path": self._shown(row.path),
            "duration": row.duration,
            "width": row.width,
            "height": row.height,
            "captions": catalog.captions_of(video),
            "pictures": catalog.picture_times(video, PREVIEWS),
        }

    def file(self, video: str) -> Path:
        """Return the file of a video that may be handed out.

        Raises:
            UnknownVideoError: no such video.
            SearchError: it may not be handed out.
        """
        return handed_out(self.searcher.file_of(video), self.handed_out)

    def picture(self, video: str, time: float) -> bytes:
        """Return the indexed frame nearest to a time as JPEG.

        Raises:
            UnknownVideoError: no such video, or none of its pictures.
        """
        return self.searcher.catalog.picture(video, time)

    def texts(self, video: str, top: int, given_up: GivenUp = never) -> list[dict[str, Any]]:
        """Return the texts that fit a video, best first.

        Raises:
            SearchError: there are no texts.
            UnknownVideoError: no such video.
            GivenUpError: `given_up` said yes.
        """
        found = self.searcher.describe(video, top, given_up=given_up)
        return [{"text": text, "score": score} for text, score in found]

    def _shown(self, path: Path) -> str:
        root = next((root for root in self.searcher.roots if root in path.parents), path.parent)
        return path.relative_to(root).as_posix()
