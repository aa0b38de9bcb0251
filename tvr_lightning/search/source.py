"""One search request, as `LocalIndex.search` takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Normalize

ExampleKind = Literal["clip", "picture"]


@dataclass(frozen=True)
class SearchRequest:
    """One search, as `Searcher.search` takes it.

    Attributes:
        query: what is to be seen; may be empty with an example.
        top: how many results.
        rerank: scorer of the second stage, "none" for the first stage's order, None for the index's first scorer.
        candidates: how many stretches the second stage scores.
        normalize: "sinkhorn" keeps hubs from crowding the results.
        folder: Folder whose videos may be found, relative to an indexed one.
        threshold: relevance that results have at least.
        like: Example that results resemble.
    """

    query: str = ""
    top: int = 10
    rerank: str | None = None
    candidates: int = 256
    normalize: Normalize = "none"
    folder: str | None = None
    threshold: float | None = None
    like: Example | None = None
