"""Vector stores: LanceDB in a folder or an object store, and Qdrant. The catalog is the truth; a store follows it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from torch import Tensor

from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.errors import SearchError, optional

STORES = "lancedb, qdrant://HOST:PORT, or an address of LanceDB such as s3://..."
LANCE_FOLDER = "vectors.lance"
"""Folder of LanceDB in an index."""
TABLE = "videos"
ROWS_FOR_AN_INDEX = 20_000
"""Number of rows from which on a table gets an index."""
ROWS_PER_PARTITION = 4096
"""LanceDB's own choice; finding the centers of so few partitions takes seconds for a million rows."""
MOST_COMPARED = 2**20
"""Minimum number of rows that a query is compared with: tables of up to about a million rows are searched exactly.

Partitions may hold more than `ROWS_PER_PARTITION` rows once LanceDB has joined some of them.
"""
COLLECTION, PORT, SECONDS = "tvr", 6333, 30
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
        """Return keys and cosines of the `count` vectors nearest to a query (D,), best first; of some keys if given."""

    def finish(self) -> None:
        """Make what was added quick to search; called when an indexing run ends."""
        return

    def close(self) -> None:
        """Let go of files and connections."""
        return


class LanceStore(VectorStore):
    """One table of M keys and vectors (M, D) float32.

    Args:
        address: a folder, or `s3://...`, `gs://...`, `az://...`.

    Raises:
        SearchError: lancedb is not installed, or a write fails.
    """

    def __init__(self, address: str) -> None:
        self._connection = optional("lancedb", "--store lancedb").connect(address)
        self._table: Any = None

    def _open(self) -> Any:
        """Return the table as it is now, None before the first vector."""
        if self._table is None and TABLE in self._connection.list_tables().tables:
            try:
                self._table = self._connection.open_table(TABLE)
            except ValueError as error:
                # A table that is listed but not found: its making was killed before the first version was written, or
                # is under way. Making it again replaces what is there.
                if "was not found" not in str(error):
                    raise
        elif self._table is not None:
            self._table.checkout_latest()
        return self._table

    def keys(self) -> set[int]:
        """Return the keys of all rows."""
        table = self._open()
        if table is None:
            return set()
        return set(table.search().select(["key"]).limit(max(table.count_rows(), 1)).to_arrow()["key"].to_pylist())

    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        """Add or replace K rows with vectors (K, D)."""
        flat = pa.array(vectors.float().reshape(-1).numpy(), type=pa.float32())
        columns = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        rows = pa.table({"key": pa.array(list(keys), type=pa.int64()), "vector": columns})
        table = self._open()
        with self._writing():
            if table is None:
                self._table = self._connection.create_table(TABLE, rows)
            else:
                table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def remove(self, keys: Sequence[int]) -> None:
        """Delete the rows of these keys."""
        table = self._open()
        for start in range(0, len(keys) if table is not None else 0, 1000):
            with self._writing():
                table.delete(f"key IN ({', '.join(str(int(key)) for key in keys[start : start + 1000])})")

    def nearest(self, query: Tensor, count: int, among: Sequence[int] | None = None) -> Hits:
        """Find rows by the cosine with a (D,) query, through the index where there is one.

        Partitions beyond `MOST_COMPARED` rows are left out, those whose centres are farthest from the query.
        """
        table = self._open()
        if table is None or (among is not None and not among):
            return []
        search = table.search(query.numpy()).distance_type("cosine").select(["key", "_distance"]).limit(count)
        search = search.nprobes(MOST_COMPARED // ROWS_PER_PARTITION)
        if among is not None:
            search = search.where(f"key IN ({', '.join(str(int(key)) for key in among)})", prefilter=True)
        rows = search.to_arrow()
        hits = [(k, 1.0 - d) for k, d in zip(rows["key"].to_pylist(), rows["_distance"].to_pylist(), strict=True)]
        return sorted(hits, key=lambda hit: -hit[1])

    def finish(self) -> None:
        """Index a large table, and what was added to an indexed one; join small files.

        The index holds the vectors as they are, grouped into partitions (IVF_FLAT). A graph over them (HNSW) takes
        hundreds of times longer to build, and quantised ones lose results that the second stage would need.
        """
        table = self._open()
        if table is None:
            return
        with self._writing():
            # Joined before the index is built: afterwards LanceDB would divide the index anew as well.
            table.optimize()
            rows = table.count_rows()
            if rows >= ROWS_FOR_AN_INDEX and not table.list_indices():
                from lancedb.index import IvfFlat

                partitions = -(-rows // ROWS_PER_PARTITION)
                table.create_index("vector", config=IvfFlat(distance_type="cosine", num_partitions=partitions))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:  # as LanceDB's own library reports disks and hosts
            reason = " ".join(str(error).split())[:300]
            raise SearchError(
                f"{self._connection.uri}: LanceDB cannot write to it ({reason}). The catalog keeps the indexed videos. "
                "Check the disk or the address, and rerun tvr index."
            ) from error


class QdrantStore(VectorStore):
    """One collection of points; keys are their ids.

    Args:
        place: `qdrant://HOST:PORT/COLLECTION`; port and collection are optional. TVR_QDRANT_API_KEY is the API key.

    Raises:
        SearchError: qdrant-client is not installed, the address is invalid, or no server answers there.
    """

    def __init__(self, place: str) -> None:
        client = optional("qdrant_client", "--store qdrant")
        self._models = client.models
        address = urlsplit(place)
        if not address.hostname:
            raise SearchError(f"{place} is not an address of Qdrant; expected qdrant://HOST:{PORT}")
        self.collection = address.path.strip("/") or COLLECTION
        try:
            self._client = client.QdrantClient(
                host=address.hostname,
                port=address.port or PORT,
                api_key=os.environ.get("TVR_QDRANT_API_KEY"),
                timeout=SECONDS,
                check_compatibility=False,
            )
            self._there = bool(self._client.collection_exists(self.collection))
        except (RuntimeError, OSError, client.http.exceptions.ApiException) as error:
            raise SearchError(f"{place}: Qdrant cannot be opened: {error}") from error

    def keys(self) -> set[int]:
        """Return the ids of all points."""
        found: set[int] = set()
        offset = None
        while self._there:
            points, offset = self._client.scroll(
                self.collection, limit=10_000, offset=offset, with_payload=False, with_vectors=False
            )
            found |= {int(point.id) for point in points}
            if offset is None:
                break
        return found

    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        """Add or replace K points with vectors (K, D)."""
        models = self._models
        if not self._there:
            shape = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
            self._client.create_collection(self.collection, vectors_config=shape)
            self._there = True
        points = [models.PointStruct(id=k, vector=v) for k, v in zip(keys, vectors.tolist(), strict=True)]
        for start in range(0, len(points), 512):
            self._client.upsert(self.collection, points[start : start + 512], wait=True)

    def remove(self, keys: Sequence[int]) -> None:
        """Delete the points of these keys."""
        if self._there and keys:
            self._client.delete(self.collection, self._models.PointIdsList(points=list(keys)), wait=True)

    def nearest(self, query: Tensor, count: int, among: Sequence[int] | None = None) -> Hits:
        """Find points by the cosine with a (D,) query."""
        if not self._there:
            self._there = bool(self._client.collection_exists(self.collection))
        if not self._there or (among is not None and not among):
            return []
        models = self._models
        only = None if among is None else models.Filter(must=[models.HasIdCondition(has_id=list(among))])
        answer = self._client.query_points(self.collection, query=query.tolist(), limit=count, query_filter=only)
        return [(int(point.id), float(point.score)) for point in answer.points]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def open_vectors(name: str, catalog: Catalog) -> VectorStore:
    """Open the vector store of an index (see `STORES`).

    Raises:
        SearchError: There is no such store, its package is not installed, or it cannot be reached.
    """
    if name == "lancedb" or ("://" in name and not name.startswith("qdrant://")):
        return LanceStore(str(catalog.folder / LANCE_FOLDER) if name == "lancedb" else name)
    if name.startswith("qdrant://"):
        return QdrantStore(name)
    raise SearchError(f"no vector store {name!r}; expected {STORES}")


def follow(store: VectorStore, catalog: Catalog, batch: int = 4096) -> tuple[int, int]:
    """Bring a store in step with the catalog, whatever an interrupted run left behind."""
    wanted, there = catalog.keys(), store.keys()
    gone = sorted(there - wanted)
    if gone:
        store.remove(gone)
    missing = sorted(wanted - there)
    for start in range(0, len(missing), batch):
        store.add(*catalog.vectors(missing[start : start + batch]))
    return len(missing), len(gone)
