"""Search in your own videos: `index` makes a folder searchable, and a `Searcher` answers queries from it."""

from __future__ import annotations

import importlib
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
    """Import a public name when it is first used."""
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"tvr_lightning.search.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
