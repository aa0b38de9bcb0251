"""One search request, as `LocalIndex.search` takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Normalize

ExampleKind = Literal["clip", "picture"]


@dataclass(frozen=True)
class SearchRequest:
    """One search, as `Searcher.search` takes it.

    Attributes:
        query: what is to be seen; may be empty beside examples.
        top: how many results.
        rerank: scorer of the second stage, "none" for the first stage's order, None for the index's first scorer.
        candidates: how many stretches the second stage scores.
        normalize: "sinkhorn" keeps hubs from crowding the results.
        folder: Folder whose videos may be found, relative to an indexed one.
        threshold: relevance that results have at least.
        without: what is not to be seen.
        like: what results look like.
        unlike: what they do not look like.
    """

    query: str = ""
    top: int = 10
    rerank: str | None = None
    candidates: int = 256
    normalize: Normalize = "none"
    folder: str | None = None
    threshold: float | None = None
    without: str = ""
    like: Sequence[Example] = ()
    unlike: Sequence[Example] = ()
