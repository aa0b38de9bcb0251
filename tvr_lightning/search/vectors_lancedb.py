"""Vectors in LanceDB: a local folder, or an object store that many machines read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from torch import Tensor

from tvr_lightning.search.errors import SearchError, optional
from tvr_lightning.search.vectors import Hits, VectorStore

TABLE = "videos"
ROWS_FOR_AN_INDEX = 20_000
"""Below it, comparing with every row is quick enough without an index."""
ROWS_PER_PARTITION = 4096
"""LanceDB's own choice; finding the centres of so few partitions takes seconds for a million rows."""
MOST_COMPARED = 2**20
"""Rows that a query is compared with at least: an indexed table of up to about a million rows is searched exactly.

Partitions may hold more than `ROWS_PER_PARTITION` rows once LanceDB has joined some of them.
"""


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
