"""The contents of an index in one SQLite file, which is changed one transaction at a time."""

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from tvr_lightning.features import VideoFeatures
from tvr_lightning.search.errors import BusyError, SearchError, UnknownVideoError, UnreadableError
from tvr_lightning.search.files import VideoFile
from tvr_lightning.search.segments import SegmentClips

FILE = "catalog.sqlite"
VERSION = 6
PATIENCE = 60.0  # seconds to wait for another process that has locked the file
# Paths are bytes, since file names need not be UTF-8.
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS videos (
  id TEXT PRIMARY KEY, key INTEGER NOT NULL UNIQUE, path BLOB NOT NULL, modified INTEGER NOT NULL,
  duration REAL NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS spans (
  key INTEGER PRIMARY KEY, id TEXT NOT NULL, place INTEGER NOT NULL, start REAL NOT NULL, end REAL NOT NULL,
  vector BLOB NOT NULL, UNIQUE (id, place));
CREATE TABLE IF NOT EXISTS skipped (
  id TEXT PRIMARY KEY, key INTEGER NOT NULL, path BLOB NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS features (
  key INTEGER NOT NULL, scorer TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (key, scorer));
CREATE TABLE IF NOT EXISTS thumbnails (
  id TEXT NOT NULL, time REAL NOT NULL, jpeg BLOB NOT NULL, PRIMARY KEY (id, time));
CREATE TABLE IF NOT EXISTS captions (
  id TEXT NOT NULL, place INTEGER NOT NULL, content TEXT NOT NULL, PRIMARY KEY (id, place));
"""
_VIDEO = "id, path, duration, width, height"


@dataclass(frozen=True)
class VideoRow:
    """A video in the catalog, with its duration in seconds and the size of the displayed frames in pixels."""

    id: str
    path: Path
    duration: float
    width: int
    height: int


@dataclass(frozen=True)
class SpanRow:
    """A segment of a video in the catalog, in seconds from the first frame. If the file changes, so does the key."""

    key: int
    start: float
    end: float
    video: VideoRow


class Catalog:
    """SQLite file of an index. If it cannot be written, it is opened for reading.

    The rollback journal (SQLite's default) lets users without write permission read while another process writes.

    Raises:
        SearchError: There is no index, it has another version, or it cannot be opened.
        BusyError: Another process locks the file for longer than `PATIENCE`.
    """

    def __init__(self, folder: Path, create: bool = False) -> None:
        self.folder, self.file = folder, folder / FILE
        if not create and not self.file.is_file():
            raise SearchError(f"{folder} contains no index. Create one with tvr index VIDEOS... --out {folder}")
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        with self._explained():
            self._connection = sqlite3.connect(
                f"{self.file.absolute().as_uri()}?mode={'rwc' if create else 'rw'}",
                timeout=PATIENCE,
                check_same_thread=False,
                isolation_level=None,
                uri=True,
            )
        try:
            tables = self._run("SELECT name FROM sqlite_master WHERE type = 'table'")
            if tables and ("facts",) not in tables:
                raise SearchError(f"{self.file} is a database of another program. Choose another folder for the index.")
            version = self.fact("version") if tables else None
            if version is None and create:
                with self._explained():
                    self._connection.executescript(_TABLES)
                self.set_fact("identity", secrets.token_hex(16))
                self.set_fact("version", VERSION)
            elif version is None:
                raise SearchError(f"{folder}: indexing has not started. Run tvr index VIDEOS... --out {folder}")
            elif version != VERSION:
                raise SearchError(
                    f"{folder} was built by an older version. Build it again with tvr index in a new folder."
                )
            self._run("PRAGMA cache_spill = OFF")  # otherwise readers would wait while a long video is written
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into messages."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError):  # a programming error
                raise
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
                raise BusyError(f"{self.file} is in use by another process. Try again in a moment.") from error
            reason = f"cannot be read or written ({error}). Check the permissions and the free space of {self.folder}"
            if code == sqlite3.SQLITE_READONLY_ROLLBACK:
                advice = f"Run tvr index --out {self.folder} once as a user with write permission."
                reason = f"contains changes from an interrupted run but is read-only. {advice}"
            elif type(error) is sqlite3.DatabaseError or "no such" in str(error):
                reason = f"is damaged ({error}). Index the videos into a new folder."
            raise UnreadableError(f"{self.file} {reason}") from error

    def _run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._explained():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make all changes of a block visible at its end, or none if it raises."""
        with self._lock, self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # on a full disk SQLite has already rolled back
                    self._connection.execute("ROLLBACK")
                raise

    def fact(self, name: str) -> Any:
        """Return a named value, None if it was not set."""
        rows = self._run("SELECT value FROM facts WHERE name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    def set_fact(self, name: str, value: Any) -> None:
        """Set a named value of plain JSON types."""
        self._run("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def generation(self) -> int:
        """Return a number that changes when another process changes the index."""
        return int(self._run("PRAGMA data_version")[0][0])

    def add_span(
        self, file: VideoFile, place: int, segment: SegmentClips, vector: Tensor, features: dict[str, VideoFeatures]
    ) -> None:
        """Add segment `place` of a video with its vector (D,) of length 1 and, by scorer, its features (M = 1)."""
        key = file.span_key(place)
        row = (key, file.id, place, segment.start, segment.end, vector.float().numpy().tobytes())
        self._run("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", row)
        for scorer, found in features.items():
            tensors = {name: x.contiguous() for name, x in vars(found.to("cpu")).items() if x is not None}
            content = save({**tensors, "times": segment.clips[scorer].times})
            self._run("INSERT INTO features VALUES (?, ?, ?)", (key, scorer, content))
        for time, jpeg in segment.thumbnails.items():
            self._run("INSERT OR REPLACE INTO thumbnails VALUES (?, ?, ?)", (file.id, time, jpeg))

    def add_video(self, file: VideoFile, duration: float, size: tuple[int, int]) -> None:
        """Add a video whose segments have been added."""
        row = (file.id, file.key, os.fsencode(file.path), file.modified, duration, *size)
        self._run("INSERT INTO videos VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def skip(self, file: VideoFile, reason: str) -> None:
        """Replace a video by the reason why it could not be read."""
        with self.change():
            self.remove([file.id])
            self._run("INSERT INTO skipped VALUES (?, ?, ?, ?)", (file.id, file.key, os.fsencode(file.path), reason))

    def remove(self, ids: Iterable[str]) -> None:
        """Remove videos and reasons why they could not be read; part of a change."""
        for video in ids:
            self._run("DELETE FROM features WHERE key IN (SELECT key FROM spans WHERE id = ?)", (video,))
            for table in ("videos", "spans", "skipped", "thumbnails", "captions"):
                self._run(f"DELETE FROM {table} WHERE id = ?", (video,))

    def videos(self) -> list[VideoRow]:
        """Return all videos in the order of their paths."""
        return [_video(row) for row in self._run(f"SELECT {_VIDEO} FROM videos ORDER BY path")]

    def video(self, video: str) -> VideoRow:
        """Return a video by its ID."""
        rows = self._run(f"SELECT {_VIDEO} FROM videos WHERE id = ?", (video,))
        if not rows:
            raise UnknownVideoError(f"no video {video!r} in the index")
        return _video(rows[0])

    def count(self) -> int:
        """Return the number of videos."""
        return int(self._run("SELECT COUNT(*) FROM videos")[0][0])

    def spans(self, video: str) -> list[SpanRow]:
        """Return the segments of a video in the order of time."""
        return self._spans("id = ?", (video,))

    def by_key(self, keys: Sequence[int]) -> dict[int, SpanRow]:
        """Return segments by key, without those of files that changed or were removed."""
        rows = self._spans("spans.key IN (SELECT value FROM json_each(?))", (json.dumps(keys),))
        return {row.key: row for row in rows}

    def _spans(self, condition: str, values: Sequence[Any]) -> list[SpanRow]:
        query = f"SELECT spans.key, start, end, {_VIDEO} FROM spans JOIN videos USING (id) WHERE {condition}"
        rows = self._run(f"{query} ORDER BY id, place", values)
        return [SpanRow(key, start, end, _video(video)) for key, start, end, *video in rows]

    @property
    def identity(self) -> str:
        """Random identity of the index, under which the state of the user is stored."""
        return str(self.fact("identity"))

    @property
    def roots(self) -> list[Path]:
        """Files and folders that the index covers."""
        return [Path(root) for root in self.fact("roots") or []]

    def in_folder(self, folder: str) -> list[int]:
        """Return the keys of the segments of the videos in a folder and its subfolders."""
        condition, values = self._folder(folder)
        query = f"SELECT key FROM spans WHERE id IN (SELECT id FROM videos WHERE {condition})"
        return [key for (key,) in self._run(query, values)]

    def listed(self, folder: str | None, limit: int, after: int) -> tuple[list[VideoRow], int]:
        """Return `limit` videos of a folder, newest first, after skipping `after`, and the number of all its videos."""
        condition, values = ("TRUE", []) if folder is None else self._folder(folder)
        count = self._run(f"SELECT COUNT(*) FROM videos WHERE {condition}", values)[0][0]
        order = f"SELECT {_VIDEO} FROM videos WHERE {condition} ORDER BY modified DESC, path LIMIT ? OFFSET ?"
        return [_video(row) for row in self._run(order, [*values, limit, after])], count

    def _folder(self, folder: str) -> tuple[str, list[Any]]:
        """Return an SQL condition on the rows of `videos`, and its values."""
        relative = PurePosixPath(folder)
        if relative.is_absolute() or ".." in relative.parts:
            raise SearchError(f"folder is {folder!r}; it must be a path inside an indexed folder, such as trips/2024")
        if not relative.parts:  # of all roots, which may be single files
            return "TRUE", []
        prefixes = [os.fsencode(root / relative) + b"/" for root in self.roots]
        condition = " OR ".join(["substr(path, 1, ?) = ?"] * len(prefixes)) or "FALSE"
        return f"({condition})", [value for prefix in prefixes for value in (len(prefix), prefix)]

    def states(self) -> dict[str, tuple[int, Path, bool]]:
        """Return the key, the path, and whether it could be read, of every file by ID."""
        query = "SELECT id, key, path, TRUE FROM videos UNION ALL SELECT id, key, path, FALSE FROM skipped"
        return {id: (key, Path(os.fsdecode(path)), bool(read)) for id, key, path, read in self._run(query)}

    def skipped(self) -> list[str]:
        """Return "path: reason" of the videos that could not be read."""
        rows = self._run("SELECT path, reason FROM skipped ORDER BY path")
        return [f"{os.fsdecode(path)}: {reason}" for path, reason in rows]

    def keys(self) -> set[int]:
        """Return the keys of all segments."""
        return {key for (key,) in self._run("SELECT key FROM spans")}

    def vectors(self, keys: Sequence[int] | None = None) -> tuple[list[int], Tensor]:
        """Return keys in ascending order and vectors (M, D) float32 of all or some segments; (0, 0) without any."""
        condition = "" if keys is None else "WHERE key IN (SELECT value FROM json_each(?))"
        values = () if keys is None else (json.dumps(keys),)
        rows = self._run(f"SELECT key, vector FROM spans {condition} ORDER BY key", values)
        if not rows:
            return [], torch.zeros(0, 0)
        vectors = np.frombuffer(b"".join(row[1] for row in rows), dtype=np.float32).reshape(len(rows), -1)
        return [row[0] for row in rows], torch.from_numpy(vectors.copy())

    def features(self, span: int, scorer: str) -> tuple[VideoFeatures, Tensor]:
        """Return the features of a segment, frames (1, F, D) and so on, and the times of its frames (F,) in seconds."""
        rows = self._run("SELECT content FROM features WHERE key = ? AND scorer = ?", (span, scorer))
        if not rows:
            raise UnknownVideoError(f"no features of {span} for {scorer} in the index")
        tensors = load(rows[0][0])
        times = tensors.pop("times")
        return VideoFeatures(**tensors), times

    def set_captions(self, captions: dict[str, list[str]]) -> None:
        """Replace the captions of all videos, given by ID in the order of time."""
        with self.change():
            self._run("DELETE FROM captions")
            for video, texts in captions.items():
                for place, text in enumerate(texts):
                    self._run("INSERT INTO captions VALUES (?, ?, ?)", (video, place, text))

    def captions_of(self, video: str) -> list[str]:
        """Return the captions of a video in the order of time."""
        return [text for (text,) in self._run("SELECT content FROM captions WHERE id = ? ORDER BY place", (video,))]

    def captioned(self) -> int:
        """Return the number of videos with captions."""
        return int(self._run("SELECT COUNT(DISTINCT id) FROM captions")[0][0])

    def thumbnail(self, video: str, time: float) -> bytes:
        """Return the JPEG of the frame nearest to a time in seconds."""
        rows = self._run("SELECT jpeg FROM thumbnails WHERE id = ? ORDER BY ABS(time - ?), time LIMIT 1", (video, time))
        if not rows:
            raise UnknownVideoError(f"no thumbnails of video {video!r} in the index")
        return bytes(rows[0][0])


def _video(row: Sequence[Any]) -> VideoRow:
    return VideoRow(row[0], Path(os.fsdecode(row[1])), *row[2:])
