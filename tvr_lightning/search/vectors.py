"""Vector stores: one interface, and the choice between LanceDB and Qdrant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.errors import SearchError

STORES = "lancedb, qdrant://HOST:PORT, or an address of LanceDB such as s3://..."
LANCE_FOLDER = "vectors.lance"
"""Folder of LanceDB in an index."""
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


def open_vectors(name: str, catalog: Catalog) -> VectorStore:
    """Open the vector store of an index.

    Args:
        name: see `STORES`.
        catalog: of the index; local stores lie in its folder.

    Raises:
        SearchError: no such store, its package is not installed, or it cannot be reached.
    """
    if name == "lancedb" or ("://" in name and not name.startswith("qdrant://")):
        from tvr_lightning.search.vectors_lancedb import LanceStore

        return LanceStore(str(catalog.folder / LANCE_FOLDER) if name == "lancedb" else name)
    if name.startswith("qdrant://"):
        from tvr_lightning.search.vectors_qdrant import QdrantStore

        return QdrantStore(name)
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
