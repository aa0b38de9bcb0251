"""Vector stores: LanceDB in the index, or Qdrant on other machines. They are derived from the catalog."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from torch import Tensor
from typing_extensions import override

from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.errors import SearchError, optional
from tvr_lightning.search.files import NamedPaths

LANCEDB = "lancedb"
LANCE_FOLDER = "vectors.lance"
"""Folder of LanceDB in an index."""
TABLE = "videos"
ROWS_FOR_AN_INDEX = 20_000
ROWS_PER_PARTITION = 4096
"""LanceDB's own choice; finding the centers of so few partitions takes seconds for a million rows."""
MOST_COMPARED = 2**20
"""Minimum number of rows that a query is compared with: tables of up to about a million rows are searched exactly."""
Hits = list[tuple[int, float]]


class VectorStore(ABC):
    """Vectors (K, D) by key, and the nearest ones to a query; `address` is "lancedb" or qdrant://HOST:PORT."""

    address = LANCEDB

    @abstractmethod
    def keys(self) -> set[int]:
        """Return the keys of all vectors."""

    @abstractmethod
    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        """Add or replace K vectors, (K, D) float32 of length 1."""

    @abstractmethod
    def remove(self, keys: Sequence[int]) -> None:
        """Remove vectors, ignoring unknown keys."""

    @abstractmethod
    def nearest(self, query: Tensor, count: int) -> Hits:
        """Return keys and cosines of the `count` vectors nearest to a query (D,), best first."""

    def finish(self) -> None:
        """Speed up searching what was added; called at the end of an indexing run."""
        return

    def close(self) -> None:
        """Close files and connections."""
        return


class LanceStore(VectorStore):
    """LanceDB table of keys and vectors in a folder."""

    def __init__(self, folder: str) -> None:
        self._connection = optional("lancedb", "--store lancedb").connect(folder)
        self._table: Any = None

    def _open(self) -> Any:
        """Return the table in its current state, None before the first vector."""
        if self._table is not None:
            self._table.checkout_latest()
        elif TABLE in self._connection.list_tables().tables:
            try:
                self._table = self._connection.open_table(TABLE)
            except ValueError as error:
                # Listed but not found: the process that created it was killed before the first version was written, or
                # is still running. Creating it again replaces it.
                if "was not found" not in str(error):
                    raise
        return self._table

    @override
    def keys(self) -> set[int]:
        table = self._open()
        if table is None:
            return set()
        return set(table.search().select(["key"]).limit(max(table.count_rows(), 1)).to_arrow()["key"].to_pylist())

    @override
    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        flat = pa.array(vectors.float().reshape(-1).numpy(), type=pa.float32())
        columns = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        rows = pa.table({"key": pa.array(list(keys), type=pa.int64()), "vector": columns})
        table = self._open()
        with self._writing():
            if table is None:
                self._table = self._connection.create_table(TABLE, rows)
            else:
                table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    @override
    def remove(self, keys: Sequence[int]) -> None:
        table = self._open()
        for start in range(0, len(keys) if table is not None else 0, 1000):
            with self._writing():
                table.delete(f"key IN ({', '.join(map(str, keys[start : start + 1000]))})")

    @override
    def nearest(self, query: Tensor, count: int) -> Hits:
        table = self._open()
        if table is None:
            return []
        search = table.search(query.numpy()).distance_type("cosine").select(["key", "_distance"]).limit(count)
        rows = search.nprobes(MOST_COMPARED // ROWS_PER_PARTITION).to_arrow()
        hits = [(k, 1.0 - d) for k, d in zip(rows["key"].to_pylist(), rows["_distance"].to_pylist(), strict=True)]
        return sorted(hits, key=lambda hit: -hit[1])

    @override
    def finish(self) -> None:
        """Join small files, and index a large table by partitions (IVF_FLAT).

        A graph (HNSW) takes hundreds of times longer, and quantized vectors lose results that the second stage needs.
        """
        table = self._open()
        if table is None:
            return
        with self._writing():
            table.optimize()  # before the index is created, or LanceDB would divide the index again
            rows = table.count_rows()
            if rows >= ROWS_FOR_AN_INDEX and not table.list_indices():
                from lancedb.index import IvfFlat

                partitions = -(-rows // ROWS_PER_PARTITION)
                table.create_index("vector", config=IvfFlat(distance_type="cosine", num_partitions=partitions))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:  # LanceDB's errors for disks
            reason = " ".join(str(error).split())[:300]
            raise SearchError(
                f"{self._connection.uri}: LanceDB cannot write to it ({reason}). The catalog keeps the indexed videos. "
                "Free disk space or change the permissions, and rerun tvr index."
            ) from error


class QdrantStore(VectorStore):
    """Collection of Qdrant at `qdrant://HOST:PORT/COLLECTION`; keys are the IDs of its points."""

    def __init__(self, address: str) -> None:
        client = optional("qdrant_client", "--store qdrant")
        self._models = client.models
        self.address, parts = address, urlsplit(address)
        self.collection = parts.path.strip("/") or "tvr"
        try:
            self._client = client.QdrantClient(
                host=parts.hostname,
                port=parts.port or 6333,
                api_key=os.environ.get("TVR_QDRANT_API_KEY"),
                timeout=30,
                check_compatibility=False,
            )
            self._exists()
        except (RuntimeError, OSError, ValueError, client.http.exceptions.ApiException) as error:
            raise SearchError(
                f"{address}: Qdrant cannot be opened ({error}). Check the address, qdrant://HOST:PORT/COLLECTION."
            ) from error

    def _exists(self) -> bool:
        return bool(self._client.collection_exists(self.collection))

    @override
    def keys(self) -> set[int]:
        found: set[int] = set()
        offset: Any = None
        while self._exists():
            points, offset = self._client.scroll(self.collection, limit=10_000, offset=offset, with_payload=False)
            found |= {int(point.id) for point in points}
            if offset is None:
                break
        return found

    @override
    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        if not self._exists():
            shape = self._models.VectorParams(size=vectors.shape[1], distance=self._models.Distance.COSINE)
            self._client.create_collection(self.collection, vectors_config=shape)
        points = [self._models.PointStruct(id=k, vector=v) for k, v in zip(keys, vectors.tolist(), strict=True)]
        self._client.upload_points(self.collection, points, batch_size=512, wait=True)

    @override
    def remove(self, keys: Sequence[int]) -> None:
        if self._exists() and keys:
            self._client.delete(self.collection, self._models.PointIdsList(points=list(keys)), wait=True)

    @override
    def nearest(self, query: Tensor, count: int) -> Hits:
        if not self._exists():
            return []
        answer = self._client.query_points(self.collection, query=query.tolist(), limit=count)
        return [(int(point.id), float(point.score)) for point in answer.points]

    @override
    def close(self) -> None:
        self._client.close()


def open_vectors(catalog: Catalog, given: str | None = None) -> VectorStore:
    """Open the vector store of an index; one on another machine only if the user has named it, now or earlier."""
    address = str(given or catalog.fact("store") or LANCEDB)
    if given is None and address != LANCEDB and NamedPaths.load(catalog.identity).store != address:
        raise SearchError(
            f"{catalog.folder}: its vectors are stored at {address}, which would receive every query, and you did not "
            f"create this index here. If you trust that address, add --store {address}"
        )
    if address == LANCEDB:
        return LanceStore(str(catalog.folder / LANCE_FOLDER))
    if address.startswith("qdrant://"):
        return QdrantStore(address)
    raise SearchError(f"no vector store {address!r}; expected {LANCEDB} or qdrant://HOST:PORT")


def update_vectors(store: VectorStore, catalog: Catalog, batch: int = 4096) -> None:
    """Update a store from the catalog."""
    wanted, there = catalog.keys(), store.keys()
    gone, missing = sorted(there - wanted), sorted(wanted - there)
    store.remove(gone)
    for start in range(0, len(missing), batch):
        store.add(*catalog.vectors(missing[start : start + batch]))
