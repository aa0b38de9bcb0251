"""Vectors in a Qdrant cluster, which shards and replicates them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from torch import Tensor

from tvr_lightning.search.errors import SearchError, optional
from tvr_lightning.search.vectors import Hits, VectorStore

COLLECTION = "tvr"
SECONDS = 30
PORT = 6333


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
