"""The LanceDB table of an index: one row per segment of a video, in a folder or in an object store.

LanceDB commits each change atomically as a new version. Readers of an older version are not disturbed, and two commits
that change the same segments are made one after the other, since `id` and `place` are the table's primary key.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from os import fsdecode, fsencode
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import load, save
from torch import Tensor

from tvr_lightning.errors import optional
from tvr_lightning.features import VideoFeatures
from tvr_lightning.search.errors import SearchError, UnknownVideoError, UnreadableError
from tvr_lightning.search.files import VideoFile

TABLE = "videos"
VERSION = 7
ROWS_FOR_AN_INDEX = 20_000
ROWS_PER_PARTITION = 4096
"""LanceDB's own choice; finding the centers of so few partitions takes seconds for a million rows."""
MOST_COMPARED = 2**20
"""Approximate number of rows that a query is compared with in a larger table. Smaller tables are searched exactly."""
SMALL_FILES = 128
"""Number of new small files that are joined at once, since joining rewrites up to a million rows."""
KEPT = timedelta(seconds=30)
"""Minimum age at which old versions are removed, since searches may still be reading them."""
_REASONS = {
    "NoSuchBucket": "the bucket does not exist",
    "credentials": "LanceDB finds no credentials (for S3, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
    "AccessDenied|Forbidden|InvalidAccessKey|SignatureDoesNotMatch|[Pp]ermission denied|Read-only": "permission denied",
    "No space left|StorageFull|File too large|fill whole buffer": "the disk is full",
    "onnection refused|error trying to connect|dns error": "the server does not answer",
}
"""Explanations of LanceDB's errors, by regular expression."""
_KEY = "lance-schema:unenforced-primary-key"
_CONFLICT = "concurrent transaction"
_CUT = "failed to fill whole buffer"  # the end of a file is missing
_VIDEO = ["id", "path", "duration", "width", "height", "captions"]
_SPAN = ["key", "start", "end", "vector", *_VIDEO]
_OLDER = "{} was built by an older version. Build it again with tvr index in a new folder."
_READ = "place = 0 AND reason IS NULL"
"""Condition on the first row of each video that could be read; other videos have one row with the reason."""


State = tuple[VideoFile, bool]
"""A file when it was indexed (size -1: segments of two states), and whether it could be read."""


@dataclass(frozen=True)
class VideoRow:
    """A video of the index, with its duration in seconds and the size of the displayed frames in pixels."""

    id: str
    path: Path
    duration: float
    width: int
    height: int
    captions: list[str]


@dataclass(frozen=True)
class SpanRow:
    """A segment of a video, in seconds from the first frame, with its vector (D,). `key` changes with the file."""

    key: int
    start: float
    end: float
    video: VideoRow
    vector: Tensor = field(compare=False)


def encoded_path(path: Path) -> str:
    """Return a path as ASCII without quotes, since names of files need not be UTF-8. Prefixes stay prefixes."""
    return quote(fsencode(path))


def _decoded_path(text: str) -> Path:
    return Path(fsdecode(unquote_to_bytes(text)))


def feature_bytes(features: VideoFeatures, times: Tensor) -> bytes:
    """Return a segment's features, frames (1, F, D) and so on, and times (F,) in seconds as one value."""
    tensors = {name: x.contiguous() for name, x in vars(features.to("cpu")).items() if x is not None}
    return save({**tensors, "times": times})


class IndexTable:
    """Table of an index at a folder or an address such as `s3://bucket/prefix`, whose credentials LanceDB finds.

    A new table is created with its first rows, so that there is never an index without any.

    Raises:
        SearchError: There is no index and `create` is not set, or the folder contains other files or another version.
        UnreadableError: The address cannot be read.
    """

    def __init__(self, address: str | Path, create: bool = False) -> None:
        self.address = str(address)
        self._facts: dict[str, Any] = {"version": VERSION, "identity": secrets.token_hex(16)}  # of a new table
        self._table: Any = None
        self._joined, self._left = float("-inf"), 0  # when files were joined, and how many stayed small
        self._lancedb = optional("lancedb", "search", "the index")
        with self._explained():
            folder = None if "://" in self.address else Path(self.address)
            names = sorted(path.name for path in folder.iterdir()) if folder and folder.is_dir() else []
            if folder is None or f"{TABLE}.lance" in names:
                self._open()
            elif "catalog.sqlite" in names:
                raise SearchError(_OLDER.format(folder))
            elif names and create:
                raise SearchError(
                    f"{folder} contains files that are not part of an index ({', '.join(names[:3])}). Choose a new or "
                    "empty folder with --out."
                )
            if create and self._table is not None:
                self._require_whole()
        if self._table is None and not create:
            raise SearchError(
                f"{self.address} contains no index. Create one with tvr index VIDEOS... --out {self.address}"
            )
        self._videos = lru_cache(1)(self._read_videos)

    def _connect(self) -> Any:
        """Connect, which creates a missing folder. Remote tables are checked for changes every two seconds."""
        fresh = timedelta(seconds=2 if "://" in self.address else 0)
        return self._lancedb.connect(self.address, read_consistency_interval=fresh)

    def _open(self) -> None:
        try:
            table = self._connect().open_table(TABLE)
        except ValueError as error:
            # There may be files: the process that created it was killed before the first version was written.
            if "was not found" in str(error):
                return
            raise
        facts = _facts_of(table)
        if "version" not in facts:
            raise SearchError(
                f"{self.address} contains a table of another program. Choose another folder or address for the index."
            )
        if facts["version"] != VERSION:
            raise SearchError(_OLDER.format(self.address))
        wanted = _schema([fact["name"] for fact in facts["scorers"]], 1, {}).names
        if missing := set(wanted).difference(table.schema.names):
            raise UnreadableError(
                f"{self.address} was changed by another program and has no {', '.join(sorted(missing))}. Index the "
                "videos into a new folder."
            )
        self._table = table

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain LanceDB's errors in one line."""
        try:
            yield
        except (RuntimeError, OSError, ValueError) as error:
            if isinstance(error, SearchError):
                raise
            text = " ".join(str(error).split())
            if _CONFLICT in text:
                raise SearchError(
                    f"{self.address} was changed by another process at the same time. Try again."
                ) from error
            reason = next((words for pattern, words in _REASONS.items() if re.search(pattern, text)), text[:300])
            raise UnreadableError(
                f"{self.address} cannot be read or written: {reason}. Earlier commits are unchanged."
            ) from error

    @property
    def is_new(self) -> bool:
        """Whether the table has not been created."""
        return self._table is None

    def close(self) -> None:
        """Release the files of the table."""
        self._table = None

    def fact(self, name: str) -> Any:
        """Return a named value, or None if it was not set."""
        return (self._facts if self._table is None else _facts_of(self._table)).get(name)

    def set_fact(self, name: str, value: Any) -> None:
        """Set a named value of plain JSON types."""
        if self._table is None:
            self._facts[name] = value
            return
        with self._explained():
            self._table.checkout_latest()
            if self.fact(name) != value:
                self._table.update_field_metadata({"path": "id", "metadata": {f"tvr:{name}": json.dumps(value)}})

    @property
    def roots(self) -> list[Path]:
        """Files and folders that the index covers."""
        return [Path(root) for root in self.fact("roots") or []]

    def generation(self) -> int:
        """Return a number that changes when the index does."""
        with self._explained():
            self._table.checkout_latest()
            return int(self._table.version)

    def commit(self, rows: Sequence[dict[str, Any]], gone: Sequence[str] = ()) -> None:
        """Add the rows of whole videos, and remove other rows of the videos in `gone`, in one commit.

        Keys of a row are the columns; features are in `features-SCORER`.
        """
        with self._explained():
            if self._table is None:
                width = next(len(row["vector"]) for row in rows if "vector" in row)
                schema = _schema([fact["name"] for fact in self._facts["scorers"]], width, self._facts)
                connection, ours = self._connect(), self._facts
                try:
                    new = _table_of(rows, schema)
                    self._table = connection.create_table(TABLE, new, on_bad_vectors="null")
                    if failure := self._failure():
                        connection.drop_table(TABLE)
                        raise failure
                    return
                except ValueError as error:
                    if "already exists" not in str(error):
                        raise
                self._open()
                if any(self.fact(name) != ours[name] for name in ("scorers", "segments")):
                    raise SearchError(f"{self.address} was just created by another process with other options.")
            table: Any = self._table
            others = f"id IN ({', '.join(map(repr, gone))})"
            merge = table.merge_insert(["id", "place"]).when_matched_update_all().when_not_matched_insert_all()
            if gone:
                merge = merge.when_not_matched_by_source_delete(others)
            if rows:
                merge.execute(_table_of(rows, table.schema), on_bad_vectors="null")
            else:
                table.delete(others)
            self._require_whole()

    def _require_whole(self) -> None:
        """Restore the last complete version if the newest is not, and raise its RuntimeError.

        LanceDB 0.40 commits a file if only its last write fails on a full disk.
        """
        failure = self._failure()
        if failure is None:
            return
        for version in sorted((each["version"] for each in self._table.list_versions()), reverse=True)[1:]:
            self._table.checkout(version)
            if self._failure() is None:
                self._table.restore()
                raise failure
        raise failure

    def _failure(self) -> RuntimeError | None:
        try:
            self._table.count_rows("place >= 0")  # opens each file, whose last bytes are read first
        except RuntimeError as error:
            return error if _CUT in str(error) else None  # other errors have other reasons
        return None

    def set_captions(self, captions: dict[str, list[str]]) -> None:
        """Replace the captions of all videos, given by ID in the order of time."""
        known = self._scan(["id", "place", "captions"]).to_pylist()
        new = [row | {"captions": captions.get(row["id"], [])} for row in known]
        if changed := [row for row, old in zip(new, known, strict=True) if row != old]:
            schema = pa.schema([self._table.schema.field(name) for name in ("id", "place", "captions")])
            with self._explained():
                merge = self._table.merge_insert(["id", "place"]).when_matched_update_all()
                merge.execute(_table_of(changed, schema))
                self._require_whole()

    def optimize(self, finish: bool = False) -> None:
        """Join small files, index a large table, and drop old versions if this pays off; `finish` ends a run.

        Vectors are indexed by partitions (IVF_FLAT). A graph (HNSW) takes hundreds of times longer, and quantized
        vectors lose results that the second stage needs.
        """
        from lancedb import index

        with self._explained():
            names = {each.columns[0]: each.name for each in self._table.list_indices()}
            late = max((self._table.index_stats(name).num_unindexed_rows for name in names.values()), default=0)
            rows = self._table.count_rows()
            create = finish and rows >= ROWS_FOR_AN_INDEX and "vector" not in names
            try:
                if create or self._small_files() > self._left + SMALL_FILES or (finish and late > rows // 16):
                    self._join()
                if finish and (wait := self._joined + KEPT.total_seconds() - time.monotonic()) > 0:
                    time.sleep(wait)
                    self._join()  # only drops the versions before
                if create:  # last, or LanceDB would split the index again
                    for name in ("id", "key", "path"):
                        self._table.create_index(name, config=index.BTree())
                    partitions = index.IvfFlat(distance_type="cosine", num_partitions=-(-rows // ROWS_PER_PARTITION))
                    self._table.create_index("vector", config=partitions)
            except RuntimeError as error:
                if _CONFLICT not in str(error):  # another process is writing, and will do it
                    raise

    def _small_files(self) -> int:
        return int(self._table.stats()["fragment_stats"]["num_small_fragments"])

    def _join(self) -> None:
        self._table.optimize()
        self._require_whole()
        self._table.optimize(cleanup_older_than=KEPT)  # the joined files are whole, so drop the old versions
        self._joined, self._left = time.monotonic(), self._small_files()

    def _scan(self, columns: list[str], where: str | None = None) -> pa.Table:
        with self._explained():
            query = self._table.search().select(columns)
            return (query.where(where) if where else query).to_arrow()

    def count(self) -> int:
        """Return the number of videos."""
        with self._explained():
            return 0 if self._table is None else int(self._table.count_rows(_READ))

    def captioned(self) -> int:
        """Return the number of videos with captions."""
        with self._explained():
            return int(self._table.count_rows(f"{_READ} AND array_length(captions) > 0"))

    def keys(self) -> list[int]:
        """Return the keys of all segments."""
        keys: list[int] = self._scan(["key"], "reason IS NULL")["key"].to_pylist()
        return keys

    def videos(self) -> list[VideoRow]:
        """Return all videos in the order of their paths."""
        return self._videos(self.generation())

    def _read_videos(self, _: int) -> list[VideoRow]:
        return sorted(map(_video, self._scan(_VIDEO, _READ).to_pylist()), key=lambda row: fsencode(row.path))

    def video(self, video: str) -> VideoRow:
        """Return a video by its ID."""
        rows = self._scan(_VIDEO, f"{_READ} AND id = '{video}'").to_pylist()
        if not rows:
            raise UnknownVideoError(f"no video {video!r} in the index")
        return _video(rows[0])

    def spans(self, video: str) -> list[SpanRow]:
        """Return the segments of a video in the order of time."""
        found = self._scan([*_SPAN, "place"], f"reason IS NULL AND id = '{video}'")
        return _spans(found.sort_by("place"))

    def nearest(
        self, query: Tensor, count: int, folder: str | None = None, without: str | None = None
    ) -> list[SpanRow]:
        """Return the `count` segments of a folder nearest to a query (D,), best first, without those of one video."""
        conditions = [*self._inside(folder), *([f"id != '{without}'"] if without else [])]
        with self._explained():
            search = self._table.search(query.numpy()).distance_type("cosine").limit(count)
            search = search.select([*_SPAN, "_distance"]).nprobes(MOST_COMPARED // ROWS_PER_PARTITION)
            return _spans((search.where(" AND ".join(conditions)) if conditions else search).to_arrow())

    def listed(self, folder: str | None, limit: int, after: int) -> tuple[list[VideoRow], int]:
        """Return `limit` videos of a folder, newest first, after skipping `after`, and the number of all its videos."""
        from lancedb.query import ColumnOrdering

        where = " AND ".join([_READ, *self._inside(folder)])
        newest = ColumnOrdering(column_name="modified", ascending=False, nulls_first=False)
        order = [newest, ColumnOrdering(column_name="path", ascending=True, nulls_first=False)]
        with self._explained():
            query = self._table.search().where(where).select([*_VIDEO, "modified"]).order_by(order)
            rows = query.limit(limit).offset(after).to_arrow().to_pylist()
            return list(map(_video, rows)), int(self._table.count_rows(where))

    def _inside(self, folder: str | None) -> list[str]:
        """Return the condition on the rows of the videos in a folder, which is relative to the roots."""
        relative = PurePosixPath(folder or "")
        if relative.is_absolute() or ".." in relative.parts:
            raise SearchError(f"folder is {folder!r}; it must be a path inside an indexed folder, such as trips/2024")
        if not relative.parts:  # of all roots, which may be single files
            return []
        prefixes = [encoded_path(root / relative) + "/" for root in self.roots]
        return ["(" + (" OR ".join(f"starts_with(path, '{prefix}')" for prefix in prefixes) or "FALSE") + ")"]

    def states(self) -> dict[str, State]:
        """Return the states of all files by ID."""
        columns = ["id", "path", "bytes", "modified", "reason"]
        states: dict[str, State] = {}
        for batch in self._scan(columns).to_batches() if self._table is not None else ():
            for id, path, size, modified, reason in zip(*map(pa.Array.to_pylist, batch.columns), strict=True):
                known = states.get(id)
                if known is None:
                    states[id] = (VideoFile(_decoded_path(path), size, modified), reason is None)
                elif (known[0].size, known[0].modified) != (size, modified):
                    states[id] = (replace(known[0], size=-1), known[1])
        return states

    def skipped(self) -> list[str]:
        """Return "path: reason" of the videos that could not be read."""
        rows = self._scan(["path", "reason"], "reason IS NOT NULL").to_pylist() if self._table is not None else []
        return [f"{path}: {reason}" for path, reason in sorted((_decoded_path(r["path"]), r["reason"]) for r in rows)]

    def vectors(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the keys and vectors (M, D) float32 of all segments in blocks."""
        with self._explained():
            query = self._table.search().where("reason IS NULL").select(["key", "vector"])
            for batch in query.to_batches(batch_size=65_536):
                if batch.num_rows:
                    yield batch["key"].to_pylist(), _tensor(batch["vector"])

    def features(self, keys: Sequence[int], scorer: str) -> dict[int, tuple[VideoFeatures, Tensor]]:
        """Return by key the features of segments, frames (1, F, D) and so on, and the times (F,) in seconds.

        Segments that another process has just removed are missing.
        """
        column = f"features-{scorer}"
        found = self._scan(["key", column], f"key IN ({', '.join(map(str, keys))})") if keys else pa.table({})
        result = {}
        for row in found.to_pylist():
            tensors = load(row[column])
            times = tensors.pop("times")
            result[row["key"]] = VideoFeatures(**tensors), times
        return result

    def thumbnail(self, video: str, time: float) -> bytes:
        """Return the JPEG of the frame nearest to a time in seconds."""
        known = self._scan(["place", "times"], f"reason IS NULL AND id = '{video}'").to_pylist()
        near = [(abs(at - time), at, row["place"], i) for row in known for i, at in enumerate(row["times"])]
        *_, place, position = min(near, default=(0.0, 0.0, -1, 0))
        found = self._scan(["thumbnails"], f"id = '{video}' AND place = {place}").to_pylist()
        if not found:
            raise UnknownVideoError(f"no thumbnails of video {video!r} in the index")
        return bytes(found[0]["thumbnails"][position])


def _facts_of(table: Any) -> dict[str, Any]:
    found = table.schema.field("id").metadata or {} if "id" in table.schema.names else {}
    return {name.decode()[4:]: json.loads(value) for name, value in found.items() if name.startswith(b"tvr:")}


def _schema(scorers: Sequence[str], width: int, facts: dict[str, Any]) -> pa.Schema:
    of_id, of_place = ({_KEY: "true", f"{_KEY}:position": position} for position in "12")
    settings = {f"tvr:{name}": json.dumps(value) for name, value in facts.items()}
    columns: dict[str, Any] = dict.fromkeys(["key", "modified", "bytes"], pa.int64())
    columns |= dict.fromkeys(["width", "height"], pa.int32())
    columns |= dict.fromkeys(["duration", "start", "end"], pa.float64())
    columns |= dict.fromkeys(["path", "reason"], pa.string())
    columns |= {"vector": pa.list_(pa.float32(), width), "times": pa.list_(pa.float64())}
    columns |= {"captions": pa.list_(pa.string()), "thumbnails": pa.list_(pa.binary())}
    columns |= dict.fromkeys([f"features-{scorer}" for scorer in scorers], pa.binary())
    key = [
        pa.field("id", pa.string(), nullable=False, metadata=of_id | settings),
        pa.field("place", pa.int32(), nullable=False, metadata=of_place),
    ]
    return pa.schema([*key, *columns.items()])


def _table_of(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = [pa.array([row.get(name) for row in rows], schema.field(name).type) for name in schema.names]
    return pa.table(columns, schema=schema)


def _tensor(column: pa.Array | pa.ChunkedArray) -> Tensor:
    """Return a column of M vectors as (M, D) float32."""
    flat = pc.list_flatten(column).to_numpy()
    return torch.from_numpy(flat.copy()).reshape(-1, column.type.list_size)


def _video(row: dict[str, Any]) -> VideoRow:
    values = {name: row[name] for name in _VIDEO}
    return VideoRow(**values | {"path": _decoded_path(row["path"]), "captions": row["captions"] or []})


def _spans(found: pa.Table) -> list[SpanRow]:
    rows = found.drop_columns(["vector"]).to_pylist()
    return [
        SpanRow(row["key"], row["start"], row["end"], _video(row), vector)
        for row, vector in zip(rows, _tensor(found["vector"]), strict=True)
    ]
