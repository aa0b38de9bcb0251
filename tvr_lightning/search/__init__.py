"""Search in one's own videos: `index` makes a folder searchable, `open` answers queries from it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvr_lightning.search.engine import Searcher
    from tvr_lightning.search.errors import BusyError, SearchError, UnknownVideoError
    from tvr_lightning.search.indexing import IndexReport, index
    from tvr_lightning.search.results import Answer, Moment, Result
    from tvr_lightning.search.scorer import ScorerSource

__all__ = [
    "Answer",
    "BusyError",
    "IndexReport",
    "Moment",
    "Result",
    "ScorerSource",
    "SearchError",
    "Searcher",
    "UnknownVideoError",
    "index",
    "open",
]

# Imported when first used, so that the command line starts without torch.
_LAZY = {
    "engine": ("Searcher",),
    "errors": ("BusyError", "SearchError", "UnknownVideoError"),
    "indexing": ("IndexReport", "index"),
    "results": ("Answer", "Moment", "Result"),
    "scorer": ("ScorerSource",),
}


def __getattr__(name: str) -> Any:
    """Return what is imported late."""
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"tvr_lightning.search.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open(path: str | Path, device: str = "cpu", store: str | None = None, trust: Sequence[str] = ()) -> Searcher:
    """Open an index for searching.

    Args:
        path: folder that `index` or `tvr index` wrote.
        device: where the methods run.
        store: address of the index's vectors, where they lie on another machine and this user has not indexed them.
        trust: modules whose classes its checkpoints may name besides this package's; they are imported.

    Raises:
        SearchError: no index, its weights are no longer what they were, or its vectors lie at an address that the user
            has not named.
    """
    from tvr_lightning.search.engine import Searcher

    return Searcher(path, device, store, trust)
