"""Vectors of an index in a LanceDB table, which is derived from the catalog."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from tvr_lightning.search.catalog import Catalog
from tvr_lightning.search.errors import SearchError, optional

LANCE_FOLDER = "vectors.lance"
"""Folder of LanceDB in an index."""
TABLE = "videos"
ROWS_FOR_AN_INDEX = 20_000
ROWS_PER_PARTITION = 4096
"""LanceDB's own choice; finding the centers of so few partitions takes seconds for a million rows."""
MOST_COMPARED = 2**20
"""Minimum number of rows that a query is compared with: tables of up to about a million rows are searched exactly."""


class LanceStore:
    """LanceDB table of keys and vectors in the folder of an index."""

    def __init__(self, index: Path) -> None:
        self._connection = optional("lancedb", "the index").connect(str(index / LANCE_FOLDER))
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

    def keys(self) -> set[int]:
        """Return the keys of all vectors."""
        table = self._open()
        if table is None:
            return set()
        return set(table.search().select(["key"]).limit(max(table.count_rows(), 1)).to_arrow()["key"].to_pylist())

    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        """Add or replace K vectors, (K, D) float32 of length 1."""
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
        """Remove vectors, ignoring unknown keys."""
        table = self._open()
        for start in range(0, len(keys) if table is not None else 0, 1000):
            with self._writing():
                table.delete(f"key IN ({', '.join(map(str, keys[start : start + 1000]))})")

    def nearest(self, query: Tensor, count: int) -> list[tuple[int, float]]:
        """Return keys and cosines of the `count` vectors nearest to a query (D,), best first."""
        table = self._open()
        if table is None:
            return []
        search = table.search(query.numpy()).distance_type("cosine").select(["key", "_distance"]).limit(count)
        rows = search.nprobes(MOST_COMPARED // ROWS_PER_PARTITION).to_arrow()
        hits = [(k, 1.0 - d) for k, d in zip(rows["key"].to_pylist(), rows["_distance"].to_pylist(), strict=True)]
        return sorted(hits, key=lambda hit: -hit[1])

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


def update_vectors(store: LanceStore, catalog: Catalog, batch: int = 4096) -> None:
    """Update a store from the catalog."""
    wanted, there = catalog.keys(), store.keys()
    gone, missing = sorted(there - wanted), sorted(wanted - there)
    store.remove(gone)
    for start in range(0, len(missing), batch):
        store.add(*catalog.vectors(missing[start : start + batch]))
