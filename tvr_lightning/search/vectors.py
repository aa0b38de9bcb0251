"""Where the vectors of the first stage are looked up: one interface, exact search, and the choice among the stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.errors import SearchError

STORES = "lancedb, exact, qdrant, qdrant://HOST:PORT, or an address of LanceDB such as s3://..."
LOCAL_STORES = {"lancedb": "vectors.lance", "qdrant": "vectors.qdrant"}
"""Folders in the index that stores create, by the store."""
Hits = list[tuple[int, float]]


class VectorStore(ABC):
    """Vectors (K, D) by key, and the nearest ones to a query. The catalog is the truth; a store only follows it."""

    @abstractmethod
    def keys(self) -> set[int]:
        """Return the keys of all vectors."""

    @abstractmethod
    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        """Add K vectors, (K, D) float32 of length 1; a key that is there already gets its new vector."""

    @abstractmethod
    def remove(self, keys: Sequence[int]) -> None:
        """Remove vectors; keys that are not there do no harm."""

    @abstractmethod
    def nearest(self, query: Tensor, count: int, among: Sequence[int] | None = None) -> Hits:
        """Find the vectors of the largest cosines with a query.

        Args:
            query: (D,) float32 of length 1.
            count: how many; all where there are fewer.
            among: keys that may be found; None for all.

        Returns:
            Pairs of key and cosine, best first.
        """

    def finish(self) -> None:
        """Make what was added quick to search; called when an indexing run ends."""
        return

    def close(self) -> None:
        """Let go of files and connections."""
        return


class ExactStore(VectorStore):
    """All cosines, computed; the vectors (M, D) are the catalog's own, so there is nothing to keep in step.

    Args:
        catalog: whose vectors.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._held: tuple[int, Tensor, Tensor] | None = None

    def keys(self) -> set[int]:
        """Return the keys of all stretches in the catalog."""
        return self.catalog.keys()

    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        """Do nothing: the catalog holds the (K, D) vectors already."""

    def remove(self, keys: Sequence[int]) -> None:
        """Do nothing: the catalog forgot them already."""

    def nearest(self, query: Tensor, count: int, among: Sequence[int] | None = None) -> Hits:
        """Compare a (D,) query with all vectors, or with those of some keys."""
        keys, vectors = self._vectors()
        if among is not None:
            chosen = torch.isin(keys, torch.tensor(list(among), dtype=torch.int64))
            keys, vectors = keys[chosen], vectors[chosen]
        if not len(keys):
            return []
        values, places = (vectors @ query).topk(min(count, len(keys)))
        return list(zip(keys[places].tolist(), values.tolist(), strict=True))

    def _vectors(self) -> tuple[Tensor, Tensor]:
        generation = self.catalog.generation
        if self._held is None or self._held[0] != generation:
            keys, vectors = self.catalog.vectors()
            self._held = (generation, torch.tensor(keys, dtype=torch.int64), vectors)
        return self._held[1], self._held[2]


def open_vectors(name: str, catalog: Catalog) -> VectorStore:
    """Open the vector store of an index.

    Args:
        name: see `STORES`.
        catalog: of the index; local stores lie in its folder.

    Raises:
        SearchError: no such store, its package is not installed, or it cannot be reached.
    """
    folder: Path = catalog.folder
    if name == "exact":
        return ExactStore(catalog)
    if name == "lancedb" or ("://" in name and not name.startswith("qdrant://")):
        from tvr_lightning.search.vectors_lancedb import LanceStore

        return LanceStore(str(folder / LOCAL_STORES[name]) if name == "lancedb" else name)
    if name == "qdrant" or name.startswith("qdrant://"):
        from tvr_lightning.search.vectors_qdrant import QdrantStore

        return QdrantStore(folder / LOCAL_STORES[name] if name == "qdrant" else name)
    raise SearchError(f"no vector store {name!r}; expected {STORES}")


def follow(store: VectorStore, catalog: Catalog, batch: int = 4096) -> tuple[int, int]:
    """Bring a store in step with the catalog, whatever an interrupted run left behind.

    Args:
        store: what follows.
        catalog: the truth.
        batch: vectors added at a time.

    Returns:
        How many vectors were added and removed.
    """
    wanted, there = catalog.keys(), store.keys()
    gone = sorted(there - wanted)
    if gone:
        store.remove(gone)
    missing = sorted(wanted - there)
    for start in range(0, len(missing), batch):
        store.add(*catalog.vectors(missing[start : start + batch]))
    return len(missing), len(gone)
