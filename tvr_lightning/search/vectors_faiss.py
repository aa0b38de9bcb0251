"""Vectors in a FAISS index in main memory, kept in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from tvr_lightning.search.errors import SearchError, optional
from tvr_lightning.search.vectors import Hits, VectorStore

FaissKind = Literal["hnsw", "ivf"]
LINKS = 32
SEARCH_WIDTH = 512
"""Candidates that HNSW keeps while it searches, and more than any first stage asks for."""


class FaissStore(VectorStore):
    """HNSW (a graph) or IVF (cells around centres); written as a whole, so for galleries that fit into memory.

    Vectors are (M, D) float32.

    Args:
        path: the file.
        kind: which index. HNSW forgets nothing, so that removing vectors builds it anew.

    Raises:
        SearchError: faiss is not installed, or the file is damaged.
    """

    def __init__(self, path: Path, kind: FaissKind) -> None:
        self.path, self.kind = path, kind
        self._faiss = optional("faiss", f"--store faiss-{kind}")
        self._keys = np.zeros(0, dtype=np.int64)
        self._vectors = np.zeros((0, 0), dtype=np.float32)
        self._index: Any = None
        self._read: int | None = None
        self._changed = False
        self._refresh()

    def _refresh(self) -> None:
        """Read the file again where another process has replaced it."""
        if self._changed or not self.path.is_file() or self._read == self.path.stat().st_mtime_ns:
            return
        modified = self.path.stat().st_mtime_ns
        try:
            index = self._faiss.read_index(str(self.path))
        except RuntimeError as error:
            raise SearchError(f"{self.path}: damaged; delete it and run tvr index again ({error})") from error
        self._read, self._index = modified, index
        self._keys = self._faiss.vector_to_array(index.id_map).copy()
        inner = self._faiss.downcast_index(index.index)
        if self.kind == "ivf":
            inner.make_direct_map()
        self._vectors = inner.reconstruct_n(0, len(self._keys))

    def keys(self) -> set[int]:
        """Return the keys of all vectors."""
        self._refresh()
        return set(self._keys.tolist())

    def add(self, keys: Sequence[int], vectors: Tensor) -> None:
        """Add or replace K vectors (K, D); `finish` writes them."""
        self.remove(keys)
        new = vectors.float().numpy()
        self._vectors = new.copy() if not len(self._keys) else np.concatenate([self._vectors, new])
        self._keys = np.concatenate([self._keys, np.asarray(list(keys), dtype=np.int64)])
        self._index, self._changed = None, True

    def remove(self, keys: Sequence[int]) -> None:
        """Remove vectors; `finish` writes what is left."""
        kept = ~np.isin(self._keys, np.asarray(list(keys), dtype=np.int64))
        if not kept.all():
            self._keys, self._vectors = self._keys[kept], self._vectors[kept]
            self._index, self._changed = None, True

    def nearest(self, query: Tensor, count: int, among: Sequence[int] | None = None) -> Hits:
        """Find vectors by the cosine with a (D,) query; approximate, and exact among few keys."""
        self._refresh()
        if not len(self._keys):
            return []
        if among is not None:
            chosen = np.isin(self._keys, np.asarray(list(among), dtype=np.int64))
            cosines = self._vectors[chosen] @ query.numpy()
            order = np.argsort(-cosines, kind="stable")[:count]
            return list(zip(self._keys[chosen][order].tolist(), cosines[order].tolist(), strict=True))
        values, found = self._built().search(query.numpy()[None], min(count, len(self._keys)))
        return [(int(k), float(v)) for k, v in zip(found[0], values[0], strict=True) if k >= 0]

    def _built(self) -> Any:
        if self._index is None:
            dimension, rows = self._vectors.shape[1], len(self._keys)
            if self.kind == "hnsw":
                inner = self._faiss.IndexHNSWFlat(dimension, LINKS, self._faiss.METRIC_INNER_PRODUCT)
                inner.hnsw.efSearch = SEARCH_WIDTH
            else:
                # About sqrt(rows) cells, and 39 vectors at least for each, as faiss recommends.
                cells = max(1, min(int(rows**0.5), rows // 39))
                coarse = self._faiss.IndexFlatIP(dimension)
                inner = self._faiss.IndexIVFFlat(coarse, dimension, cells, self._faiss.METRIC_INNER_PRODUCT)
                inner.nprobe = max(1, cells // 4)
                inner.cp.min_points_per_centroid = 1  # a single cell of a small gallery is no reason to warn
                inner.train(self._vectors)
            index = self._faiss.IndexIDMap(inner)
            index.add_with_ids(self._vectors, self._keys)
            self._index = index
        return self._index

    def finish(self) -> None:
        """Build the index and replace the file at once."""
        if not self._changed:
            return
        if not len(self._keys):
            self.path.unlink(missing_ok=True)
        else:
            draft = self.path.with_name(f"{self.path.name}.draft")
            self._faiss.write_index(self._built(), str(draft))
            draft.replace(self.path)
            self._read = self.path.stat().st_mtime_ns
        self._changed = False
