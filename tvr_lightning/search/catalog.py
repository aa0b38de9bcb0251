"""What an index knows of its videos: one SQLite file that holds whole batches or nothing of them."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from tvr_lightning.features import VideoFeatures
from tvr_lightning.search.errors import BusyError, RefusedError, SearchError, UnknownVideoError
from tvr_lightning.search.files import VideoFile

FILE = "catalog.sqlite"
VERSION = 4
PATIENCE = 60.0
"""Seconds to wait for another process that holds the file."""
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS videos (
  id TEXT PRIMARY KEY, key INTEGER NOT NULL UNIQUE, path TEXT NOT NULL, size INTEGER NOT NULL,
  modified INTEGER NOT NULL, duration REAL NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS spans (
  key INTEGER PRIMARY KEY, id TEXT NOT NULL, place INTEGER NOT NULL, start REAL NOT NULL, end REAL NOT NULL,
  vector BLOB NOT NULL, UNIQUE (id, place));
CREATE TABLE IF NOT EXISTS skipped (
  id TEXT PRIMARY KEY, key INTEGER NOT NULL, path TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS features (
  key INTEGER NOT NULL, scorer TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (key, scorer));
CREATE TABLE IF NOT EXISTS pictures (
  id TEXT NOT NULL, time REAL NOT NULL, jpeg BLOB NOT NULL, PRIMARY KEY (id, time));
CREATE TABLE IF NOT EXISTS captions (
  id TEXT NOT NULL, place INTEGER NOT NULL, content TEXT NOT NULL, PRIMARY KEY (id, place));
"""


@dataclass
class SpanEntry:
    """One segment of a video with what the methods make of it.

    Attributes:
        start, end: seconds from the video's first frame.
        vector: (D,) float32 of length 1, what the first stage compares.
        features: of this segment, by scorer; frames (1, F, D) and so on, as the scorer's `score` takes them.
        times: (F,) seconds of the frames from the video's first one, by scorer.
    """

    start: float
    end: float
    vector: Tensor
    features: dict[str, VideoFeatures] = field(default_factory=dict)
    times: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Entry:
    """One video with everything that the index keeps of it.

    Attributes:
        file: the file as it was read.
        duration: seconds.
        spans: its segments in the order of time; one of its whole length where it is found as a whole.
        pictures: JPEG of each real frame of the first scorer, by its time in seconds.
        size: width and height of its pictures as they are shown, pixels; zeros where unknown.
    """

    file: VideoFile
    duration: float
    spans: list[SpanEntry]
    pictures: dict[float, bytes] = field(default_factory=dict)
    size: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class VideoRow:
    """A video in the catalog.

    Attributes:
        id: sixteen hexadecimal digits.
        key: a number that stands for this state of the file.
        path: the file.
        duration: seconds.
        width, height: pixels as it is shown.
    """

    id: str
    key: int
    path: Path
    duration: float
    width: int
    height: int


@dataclass(frozen=True)
class SpanRow:
    """A segment of a video in the catalog.

    Attributes:
        key: what vector stores call it; another one once the file has changed.
        start, end: seconds from the video's first frame.
        video: whose segment it is.
    """

    key: int
    start: float
    end: float
    video: VideoRow


class Catalog:
    """Opens an index's SQLite file; readers see whole batches while another process writes.

    Where the file or its folder cannot be written, an index is opened for reading alone.

    Args:
        folder: of the index.
        create: make it where it is absent.

    Raises:
        SearchError: there is no index, one of another version, or one that cannot be opened.
        BusyError: another process holds the file for longer than `PATIENCE`.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        self.folder = folder
        if not create and not (folder / FILE).is_file():
            raise SearchError(f"{folder} contains no index. Create one with tvr index VIDEOS... --out {folder}")
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._seen: tuple[int, ...] | None = None  # how the files were where SQLite does not look after changes
        with self._explained():
            self._connection = self._open(create)
        try:
            version = self.fact("version")
            if version is None and create:
                self.set_fact("version", version := VERSION)
            if version not in (None, VERSION):
                raise SearchError(
                    f"{folder} was built by an older version. Build it again with tvr index in a new folder."
                )
        except BaseException:
            self.close()
            raise

    def _open(self, create: bool) -> sqlite3.Connection:
        """Open the file for writing, or where that is impossible and nothing is to be created, for reading."""
        until = monotonic() + PATIENCE
        while True:
            try:
                return self._connect("mode=rwc" if create else "mode=rw", "PRAGMA journal_mode=WAL", _TABLES)
            except sqlite3.OperationalError as error:
                if not _busy(error):
                    if create:
                        raise
                    return self._open_for_reading()
                if monotonic() > until:
                    raise
            sleep(0.05)  # SQLite itself does not wait where the journal's mode is changed

    def _open_for_reading(self) -> sqlite3.Connection:
        """Open the file where it cannot be written.

        Beside a writer SQLite reads its journal. Without one there is none, and SQLite could not make the files that go
        with it; the file is then read as one that does not change, and opened anew once it did (`_rows`).
        """
        self._seen = None
        seen = self._state()
        try:
            return self._connect("mode=ro", "SELECT 1 FROM facts")
        except sqlite3.OperationalError as error:
            if _busy(error):
                raise
        if seen[-1] > 0:
            raise SearchError(
                f"{self.folder / FILE} contains changes from an interrupted run but is read-only. Run tvr index "
                f"--out {self.folder} once as a user with write permission."
            )
        connection = self._connect("immutable=1", "SELECT 1 FROM facts")
        self._seen = seen
        return connection

    def _state(self) -> tuple[int, ...]:
        """Return what tells changes of the files: modification time and size of the catalog, size of its journal."""
        state, journal = (self.folder / FILE).stat(), self.folder / f"{FILE}-wal"
        try:
            written = journal.stat().st_size
        except FileNotFoundError:
            written = 0
        return state.st_mtime_ns, state.st_size, written

    def _connect(self, how: str, *scripts: str) -> sqlite3.Connection:
        address = f"{(self.folder / FILE).absolute().as_uri()}?{how}"
        connection = sqlite3.connect(address, timeout=PATIENCE, check_same_thread=False, isolation_level=None, uri=True)
        try:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables and "facts" not in tables:
                raise RefusedError(
                    f"{self.folder / FILE} is a database of another program. Choose another folder for the index."
                )
            for script in scripts:
                connection.executescript(script)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the file; the object is of no further use."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into sentences; only a damaged file is called so."""
        try:
            yield
        except sqlite3.OperationalError as error:
            file = self.folder / FILE
            if _busy(error):
                raise BusyError(f"{file} is in use by another process ({error}). Try again in a moment.") from error
            if "no such" in str(error):
                raise SearchError(f"{file} is damaged ({error}). Index the videos into a new folder.") from error
            raise SearchError(
                f"{file} cannot be read or written ({error}). Check the permissions and the free space of {self.folder}"
            ) from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # a mistake of the program
                raise
            raise SearchError(
                f"{self.folder / FILE} is damaged ({error}). Index the videos into a new folder."
            ) from error

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._explained():
            while True:
                try:
                    rows = self._connection.execute(query, values).fetchall()
                except sqlite3.DatabaseError:
                    if self._seen is None or self._seen == self._state():
                        raise
                else:
                    if self._seen is None or self._seen == self._state():
                        return rows
                self._connection.close()
                self._connection = self._open_for_reading()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """All of a change or nothing of it; `generation` counts changes."""
        with self._lock, self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute(
                    "INSERT INTO facts VALUES ('generation', '1') "
                    "ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1"
                )
            except BaseException:
                if self._connection.in_transaction:  # on a full disk SQLite has rolled back by itself
                    self._connection.execute("ROLLBACK")
                raise
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def fact(self, name: str) -> Any:
        """Return a value kept under a name, None where there is none."""
        rows = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    def set_fact(self, name: str, value: Any) -> None:
        """Keep a value of plain JSON types under a name."""
        with self._change() as connection:
            connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    @property
    def generation(self) -> int:
        """A number that grows with every change."""
        return int(self.fact("generation") or 0)

    def write(self, entries: Iterable[Entry], skipped: Iterable[tuple[VideoFile, str]] = ()) -> None:
        """Add or replace videos, and note those that could not be read with their reasons."""
        with self._change() as connection:
            for entry in entries:
                self._forget(connection, entry.file.id)
                self._insert(connection, entry)
            for file, reason in skipped:
                self._forget(connection, file.id)
                connection.execute(
                    "INSERT INTO skipped VALUES (?, ?, ?, ?)", (file.id, file.key, str(file.path), reason)
                )

    @staticmethod
    def _insert(connection: sqlite3.Connection, entry: Entry) -> None:
        file = entry.file
        row = (file.id, file.key, str(file.path), file.size, file.modified, entry.duration, *entry.size)
        connection.execute("INSERT INTO videos VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        _insert_parts(connection, file, 0, entry.spans, entry.pictures)

    def write_blocks(
        self,
        file: VideoFile,
        blocks: Iterable[tuple[Sequence[SpanEntry], dict[float, bytes]]],
        facts: Callable[[], tuple[float, tuple[int, int]]],
    ) -> None:
        """Add or replace a long video block by block; readers see it once it is complete.

        Args:
            file: the video.
            blocks: Segments in the order of time, and their thumbnails.
            facts: Called at the end; returns duration and size.
        """
        with self._change() as connection:
            self._forget(connection, file.id)
            first = 0
            for spans, pictures in blocks:
                _insert_parts(connection, file, first, spans, pictures)
                first += len(spans)
            duration, size = facts()
            self._insert(connection, Entry(file, duration, [], {}, size))

    def remove(self, ids: Iterable[str]) -> None:
        """Forget videos and what was noted of unreadable ones."""
        with self._change() as connection:
            for video in ids:
                self._forget(connection, video)

    @staticmethod
    def _forget(connection: sqlite3.Connection, video: str) -> None:
        connection.execute("DELETE FROM features WHERE key IN (SELECT key FROM spans WHERE id = ?)", (video,))
        for table in ("videos", "spans", "skipped", "pictures", "captions"):
            connection.execute(f"DELETE FROM {table} WHERE id = ?", (video,))

    def videos(self) -> list[VideoRow]:
        """Return all videos in the order of their paths."""
        return [_video(row) for row in self._rows(f"SELECT {_VIDEO} FROM videos ORDER BY path")]

    def video(self, video: str) -> VideoRow:
        """Return one video by its id."""
        rows = self._rows(f"SELECT {_VIDEO} FROM videos WHERE id = ?", (video,))
        if not rows:
            raise UnknownVideoError(f"no video {video!r} in the index")
        return _video(rows[0])

    def spans(self, video: str) -> list[SpanRow]:
        """Return the segments of a video in the order of time; none where there is no such video."""
        return self._spans("id = ?", (video,))

    def by_key(self, keys: Sequence[int]) -> dict[int, SpanRow]:
        """Return segments by key; keys of files that changed or are gone are left out."""
        rows = self._spans("spans.key IN (SELECT value FROM json_each(?))", (json.dumps(list(keys)),))
        return {row.key: row for row in rows}

    def _spans(self, condition: str, values: Sequence[Any]) -> list[SpanRow]:
        query = f"SELECT spans.key, start, end, {_VIDEO} FROM spans JOIN videos USING (id) WHERE {condition}"
        rows = self._rows(f"{query} ORDER BY id, place", values)
        return [SpanRow(key, start, end, _video(video)) for key, start, end, *video in rows]

    @property
    def roots(self) -> list[Path]:
        """Files and folders that the index covers."""
        return [Path(root) for root in self.fact("roots") or []]

    def in_folder(self, folder: str, most: int) -> list[int]:
        """Return up to `most` keys of segments of the videos in a folder or below it."""
        condition, values = self._below(folder)
        query = f"SELECT key FROM spans WHERE id IN (SELECT id FROM videos WHERE {condition}) LIMIT ?"
        return [row[0] for row in self._chosen(query, [*values, most])]

    def keep_in_folder(self, keys: Sequence[int], folder: str) -> list[int]:
        """Return the keys of those segments whose videos are in a folder or below it."""
        condition, values = self._below(folder)
        query = f"SELECT spans.key FROM spans JOIN videos USING (id) WHERE {condition}"
        given = [*values, json.dumps(list(keys))]
        return [row[0] for row in self._chosen(f"{query} AND spans.key IN (SELECT value FROM json_each(?))", given)]

    def listed(self, folder: str | None, most: int, after: int) -> tuple[list[VideoRow], int]:
        """Return `most` videos of a folder, the newest first, skipping `after`, and the number of all its videos."""
        condition, values = self._below(folder)
        count = self._chosen(f"SELECT COUNT(*) FROM videos WHERE {condition}", values)
        order = f"SELECT {_VIDEO} FROM videos WHERE {condition} ORDER BY modified DESC, path LIMIT ? OFFSET ?"
        return [_video(row) for row in self._chosen(order, [*values, most, after])], count[0][0] if count else 0

    def _below(self, folder: str | None) -> tuple[str, list[str | int]]:
        """Return an SQL condition on the rows of `videos`, and its values."""
        if folder is None:
            return "TRUE", []
        relative = PurePosixPath(folder)
        if relative.is_absolute() or ".." in relative.parts:
            raise SearchError(f"folder is {folder!r}; it must be a path inside an indexed folder, such as trips/2024")
        prefixes = [f"{root / relative}/".replace("//", "/") for root in self.roots]
        condition = " OR ".join(["substr(path, 1, ?) = ?"] * len(prefixes)) or "FALSE"
        return f"({condition})", [value for prefix in prefixes for value in (len(prefix), prefix)]

    def _chosen(self, query: str, values: Sequence[str | int]) -> list[tuple[Any, ...]]:
        try:
            return self._rows(query, values)
        except UnicodeEncodeError:  # half a character, from bytes on the command line: no text here contains it
            return []

    def folders(self) -> list[tuple[Path, int]]:
        """Return the folders that videos lie in, with how many each holds."""
        name = "rtrim(path, replace(path, '/', ''))"
        return [
            (Path(folder), count) for folder, count in self._rows(f"SELECT {name}, COUNT(*) FROM videos GROUP BY 1")
        ]

    def picture_times(self, video: str, most: int) -> list[float]:
        """Return the times of up to so many pictures of a video, at equal steps."""
        times = [row[0] for row in self._rows("SELECT time FROM pictures WHERE id = ? ORDER BY time", (video,))]
        return times if len(times) <= most else [times[round(k * (len(times) - 1) / (most - 1))] for k in range(most)]

    def some_captions(self, most: int) -> list[str]:
        """Return the first captions of some videos."""
        return [
            row[0] for row in self._rows("SELECT content FROM captions WHERE place = 0 ORDER BY id LIMIT ?", (most,))
        ]

    def known(self) -> dict[str, int]:
        """Return the key of every video that was read or skipped, by id."""
        return dict(self._rows("SELECT id, key FROM videos UNION ALL SELECT id, key FROM skipped"))

    def paths(self) -> dict[str, Path]:
        """Return the path of every video that was read or skipped, by id."""
        rows = self._rows("SELECT id, path FROM videos UNION ALL SELECT id, path FROM skipped")
        return {video: Path(path) for video, path in rows}

    def skipped(self) -> list[str]:
        """Return "path: reason" of the videos that could not be read."""
        return [f"{path}: {reason}" for path, reason in self._rows("SELECT path, reason FROM skipped ORDER BY path")]

    def keys(self) -> set[int]:
        """Return the keys of all segments."""
        return {row[0] for row in self._rows("SELECT key FROM spans")}

    def read(self) -> set[int]:
        """Return the keys of the states of all files that were read."""
        return {row[0] for row in self._rows("SELECT key FROM videos")}

    def count(self) -> int:
        """Return how many videos there are."""
        return int(self._rows("SELECT COUNT(*) FROM videos")[0][0])

    def vectors(self, keys: Sequence[int] | None = None) -> tuple[list[int], Tensor]:
        """Return keys and the (M, D) float32 vectors of the first stage, of all segments or of some.

        Returns:
            Keys in ascending order, and their vectors; (0, 0) where there are none.
        """
        if keys is None:
            rows = self._rows("SELECT key, vector FROM spans ORDER BY key")
        else:
            query = "SELECT key, vector FROM spans WHERE key IN (SELECT value FROM json_each(?)) ORDER BY key"
            rows = self._rows(query, (json.dumps(list(keys)),))
        if not rows:
            return [], torch.zeros(0, 0)
        values = np.frombuffer(b"".join(row[1] for row in rows), dtype=np.float32).reshape(len(rows), -1)
        return [row[0] for row in rows], torch.from_numpy(values.copy())

    def features(self, span: int, scorer: str) -> tuple[VideoFeatures, Tensor]:
        """Return the features of one segment, frames (1, F, D) and so on, and their times (F,) in seconds."""
        rows = self._rows("SELECT content FROM features WHERE key = ? AND scorer = ?", (span, scorer))
        if not rows:
            raise UnknownVideoError(f"no features of {span} for {scorer} in the index")
        return _unpacked(rows[0][0])

    def set_captions(self, captions: dict[str, list[str]]) -> None:
        """Replace the captions of all videos, by id and in the order of time."""
        rows = [(video, place, text) for video, texts in captions.items() for place, text in enumerate(texts)]
        if rows == self._rows("SELECT id, place, content FROM captions"):
            return
        with self._change() as connection:
            connection.execute("DELETE FROM captions")
            connection.executemany("INSERT INTO captions VALUES (?, ?, ?)", rows)

    def captions(self) -> dict[str, list[str]]:
        """Return the captions of every video that has some, by id and in the order of time."""
        found: dict[str, list[str]] = {}
        for video, text in self._rows("SELECT id, content FROM captions ORDER BY id, place"):
            found.setdefault(video, []).append(text)
        return found

    def captions_of(self, video: str) -> list[str]:
        """Return the captions of one video in the order of time."""
        return [row[0] for row in self._rows("SELECT content FROM captions WHERE id = ? ORDER BY place", (video,))]

    def captioned(self) -> int:
        """Return how many videos have captions."""
        return int(self._rows("SELECT COUNT(DISTINCT id) FROM captions")[0][0])

    def picture(self, video: str, time: float) -> bytes:
        """Return the JPEG of the frame nearest to a time in seconds.

        Raises:
            UnknownVideoError: there is no picture of the video.
        """
        query = "SELECT jpeg FROM pictures WHERE id = ? ORDER BY ABS(time - ?), time LIMIT 1"
        rows = self._rows(query, (video, time))
        if not rows:
            raise UnknownVideoError(f"no thumbnails of video {video!r} in the index")
        return rows[0][0]


_VIDEO = "id, videos.key, path, duration, width, height"


def _video(row: Sequence[Any]) -> VideoRow:
    return VideoRow(row[0], row[1], Path(row[2]), *row[3:])


def _busy(error: sqlite3.OperationalError) -> bool:
    """Whether another process holds the file."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte of an extended code is the primary one
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _insert_parts(
    connection: sqlite3.Connection,
    file: VideoFile,
    first: int,
    spans: Sequence[SpanEntry],
    pictures: dict[float, bytes],
) -> None:
    for place, span in enumerate(spans, first):
        key, vector = file.span_key(place), span.vector.float().numpy().tobytes()
        line = (key, file.id, place, span.start, span.end, vector)
        connection.execute("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", line)
        for scorer, features in span.features.items():
            content = _packed(features, span.times[scorer])
            connection.execute("INSERT INTO features VALUES (?, ?, ?)", (key, scorer, content))
    rows = [(file.id, time, jpeg) for time, jpeg in pictures.items()]
    connection.executemany("INSERT INTO pictures VALUES (?, ?, ?)", rows)


def _packed(features: VideoFeatures, times: Tensor) -> bytes:
    tensors = {name: value for name, value in features.to("cpu")._fields() if value is not None}
    return save({**{name: tensor.contiguous() for name, tensor in tensors.items()}, "times": times})


def _unpacked(content: bytes) -> tuple[VideoFeatures, Tensor]:
    tensors = load(content)
    times = tensors.pop("times")
    return VideoFeatures(**tensors), times
