"""Search in your own videos: `index` makes a folder searchable, and a `Searcher` answers queries from it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvr_lightning.search.engine import Searcher
    from tvr_lightning.search.errors import BusyError, SearchError, UnknownVideoError
    from tvr_lightning.search.indexing import IndexReport, index
    from tvr_lightning.search.query import SearchQuery
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
    "SearchQuery",
    "Searcher",
    "UnknownVideoError",
    "index",
]
_MODULES = ("results", "errors", "query", "indexing", "engine")


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line starts without torch."""
    for module in _MODULES if name in __all__ else ():
        imported = importlib.import_module(f"tvr_lightning.search.{module}")
        if hasattr(imported, name):
            return getattr(imported, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
