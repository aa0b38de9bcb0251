"""What an index knows of its videos: one SQLite file that holds whole batches or nothing of them."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from tvr_lightning.features import VideoFeatures
from tvr_lightning.search.errors import SearchError, UnknownVideoError
from tvr_lightning.search.files import VideoFile

FILE = "catalog.sqlite"
VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS videos (
  id TEXT PRIMARY KEY, key INTEGER NOT NULL UNIQUE, path TEXT NOT NULL, size INTEGER NOT NULL,
  modified INTEGER NOT NULL, duration REAL NOT NULL, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS skipped (
  id TEXT PRIMARY KEY, key INTEGER NOT NULL, path TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS features (
  id TEXT NOT NULL, scorer TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (id, scorer));
CREATE TABLE IF NOT EXISTS pictures (
  id TEXT NOT NULL, time REAL NOT NULL, jpeg BLOB NOT NULL, PRIMARY KEY (id, time));
CREATE TABLE IF NOT EXISTS captions (
  id TEXT NOT NULL, place INTEGER NOT NULL, content TEXT NOT NULL, PRIMARY KEY (id, place));
"""


@dataclass
class Entry:
    """One video with everything that the index keeps of it.

    Attributes:
        file: the file as it was read.
        duration: seconds.
        vector: (D,) float32 of length 1, what the first stage compares.
        features: of one video, by scorer; frames (1, F, D) and so on, as the scorer's `score` takes them.
        times: (F,) seconds of the frames, by scorer.
        pictures: JPEG of each real frame of the first scorer, by its time in seconds.
    """

    file: VideoFile
    duration: float
    vector: Tensor
    features: dict[str, VideoFeatures] = field(default_factory=dict)
    times: dict[str, Tensor] = field(default_factory=dict)
    pictures: dict[float, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class VideoRow:
    """A video in the catalog.

    Attributes:
        id: sixteen hexadecimal digits.
        key: what vector stores call this state of the file.
        path: the file.
        duration: seconds.
    """

    id: str
    key: int
    path: Path
    duration: float


class Catalog:
    """Opens an index's SQLite file; readers see whole batches while another process writes.

    Args:
        folder: of the index.
        create: make it where it is absent.

    Raises:
        SearchError: there is no index, or one of another version.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        self.folder = folder
        if not create and not (folder / FILE).is_file():
            raise SearchError(f"{folder}: no index here; make one with tvr index VIDEOS... --out {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(folder / FILE, timeout=60, check_same_thread=False, isolation_level=None)
        try:
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.executescript(_TABLES)
            version = self.fact("version")
        except sqlite3.OperationalError as error:
            self._connection.close()
            raise SearchError(f"{folder / FILE}: cannot be read or written ({error})") from error
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise SearchError(f"{folder / FILE}: damaged ({error}); index the videos into a new folder") from error
        if version is None:
            self.set_fact("version", VERSION)
        elif version != VERSION:
            self.close()
            raise SearchError(f"{folder}: index of version {version}, expected {VERSION}; index the videos anew")

    def close(self) -> None:
        """Close the file; the object is of no further use."""
        with self._lock:
            self._connection.close()

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """All of a change or nothing of it; `generation` counts changes."""
        with self._lock:
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
        vector = entry.vector.float().numpy().tobytes()
        row = (file.id, file.key, str(file.path), file.size, file.modified, entry.duration, vector)
        connection.execute("INSERT INTO videos VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        for scorer, features in entry.features.items():
            content = _packed(features, entry.times[scorer])
            connection.execute("INSERT INTO features VALUES (?, ?, ?)", (file.id, scorer, content))
        for time, jpeg in entry.pictures.items():
            connection.execute("INSERT INTO pictures VALUES (?, ?, ?)", (file.id, time, jpeg))

    def remove(self, ids: Iterable[str]) -> None:
        """Forget videos and what was noted of unreadable ones."""
        with self._change() as connection:
            for video in ids:
                self._forget(connection, video)

    @staticmethod
    def _forget(connection: sqlite3.Connection, video: str) -> None:
        for table in ("videos", "skipped", "features", "pictures", "captions"):
            connection.execute(f"DELETE FROM {table} WHERE id = ?", (video,))

    def videos(self) -> list[VideoRow]:
        """Return all videos in the order of their paths."""
        rows = self._rows("SELECT id, key, path, duration FROM videos ORDER BY path")
        return [VideoRow(video, key, Path(path), duration) for video, key, path, duration in rows]

    def video(self, video: str) -> VideoRow:
        """Return one video by its id.

        Raises:
            UnknownVideoError: there is none.
        """
        rows = self._rows("SELECT id, key, path, duration FROM videos WHERE id = ?", (video,))
        if not rows:
            raise UnknownVideoError(f"no video {video!r} in the index")
        return VideoRow(rows[0][0], rows[0][1], Path(rows[0][2]), rows[0][3])

    def by_key(self, keys: Sequence[int]) -> dict[int, VideoRow]:
        """Return videos by key; keys of files that changed or are gone are left out."""
        found = {}
        for some in _chunks(keys):
            marks = ",".join("?" * len(some))
            for row in self._rows(f"SELECT id, key, path, duration FROM videos WHERE key IN ({marks})", some):
                found[row[1]] = VideoRow(row[0], row[1], Path(row[2]), row[3])
        return found

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
        """Return the keys of all videos."""
        return {row[0] for row in self._rows("SELECT key FROM videos")}

    def count(self) -> int:
        """Return how many videos there are."""
        return int(self._rows("SELECT COUNT(*) FROM videos")[0][0])

    def vectors(self, keys: Sequence[int] | None = None) -> tuple[list[int], Tensor]:
        """Return keys and the (M, D) float32 vectors of the first stage, of all videos or of some.

        Returns:
            Keys in ascending order, and their vectors; (0, 0) where there are no videos.
        """
        if keys is None:
            rows = self._rows("SELECT key, vector FROM videos ORDER BY key")
        else:
            rows = sorted(
                row
                for some in _chunks(keys)
                for row in self._rows(
                    f"SELECT key, vector FROM videos WHERE key IN ({','.join('?' * len(some))})", some
                )
            )
        if not rows:
            return [], torch.zeros(0, 0)
        values = np.frombuffer(b"".join(row[1] for row in rows), dtype=np.float32).reshape(len(rows), -1)
        return [row[0] for row in rows], torch.from_numpy(values.copy())

    def features(self, video: str, scorer: str) -> tuple[VideoFeatures, Tensor]:
        """Return the features of one video, frames (1, F, D) and so on, and the times (F,) of its frames in seconds.

        Raises:
            UnknownVideoError: the video is not there, or was indexed without this scorer.
        """
        rows = self._rows("SELECT content FROM features WHERE id = ? AND scorer = ?", (video, scorer))
        if not rows:
            raise UnknownVideoError(f"no features of video {video!r} for {scorer} in the index")
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
            raise UnknownVideoError(f"no pictures of video {video!r} in the index")
        return rows[0][0]


def _chunks(keys: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide keys into as many as one query takes."""
    return (keys[start : start + 500] for start in range(0, len(keys), 500))


def _packed(features: VideoFeatures, times: Tensor) -> bytes:
    tensors = {name: value for name, value in features.to("cpu")._fields() if value is not None}
    return save({**{name: tensor.contiguous() for name, tensor in tensors.items()}, "times": times})


def _unpacked(content: bytes) -> tuple[VideoFeatures, Tensor]:
    tensors = load(content)
    times = tensors.pop("times")
    return VideoFeatures(**tensors), times
