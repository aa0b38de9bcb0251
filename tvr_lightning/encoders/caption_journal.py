"""Crash-safe writing of a captions file through a journal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tvr_lightning.data.recover_captions import SCHEMA, Description
from tvr_lightning.errors import UserError
from tvr_lightning.files import file_lock, remedy, write_whole

SETTINGS = b"tvr_captions"


_OWN = ("video_id", "segment", "start", "end", "caption")  # the other columns are constant in a file


class CaptionJournalError(UserError):
    """The captions file conflicts with the new descriptions; the message names the option and a fix."""


@dataclass(frozen=True)
class MadeWith:
    """Settings that determine the descriptions of given videos.

    Attributes:
        model: Hub name or folder of the model.
        prompt: Prompt for the model.
        weights_hash: Hash of the weights.
        segments: Number of segments per video N_s.
        reading: Description of the model's input for a segment.
    """

    model: str
    prompt: str
    weights_hash: str
    segments: int
    reading: str


class CaptionJournal:
    """Context manager that appends groups of descriptions to a journal and finally writes the captions file.

    Each group is one line of the journal. If the process is killed, at most the current group is lost; incomplete
    lines are ignored. The lock `<file>.lock` allows one writing process at a time.

    Attributes:
        described: IDs of the videos described so far.

    Args:
        out: parquet file; its existing descriptions are kept.
        made_with: settings of the new descriptions.

    Raises:
        CaptionJournalError: The file or an unfinished journal was written with other settings, or the file does not
            contain descriptions.
        UserError: Another process writes the file, or (on entering, `add` and `finish`) the disk is full or read-only.
    """

    def __init__(self, out: Path, made_with: MadeWith) -> None:
        self.out = out
        self.made_with = made_with
        self.path = out.with_name(out.name + ".unfinished")
        self._descriptions: dict[str, list[Description]] = {}
        self._held = ExitStack()
        self._file: IO[bytes] | None = None

    @property
    def described(self) -> set[str]:
        """IDs of the videos described so far."""
        return set(self._descriptions)

    def __enter__(self) -> CaptionJournal:
        """Lock the file, read its descriptions, and open the journal for appending after its last complete line."""
        with ExitStack() as held_so_far:
            busy = UserError(f"Another process is writing the captions {self.out}. Wait for it or stop it.")
            lock = self.out.with_name(self.out.name + ".lock")
            with self._writing(lock):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                held_so_far.enter_context(
                    file_lock(lock, busy, "do not start a second tvr caption with the same --out")
                )
            if self.out.is_file():
                self._take(_read(self.out, self.made_with))
            length = self._resume() if self.path.is_file() else 0
            with self._writing(self.path):
                # With a buffer, closing the file would try to write again and fail again on a full disk.
                self._file = held_so_far.enter_context(self.path.open("ab", buffering=0))
                self._file.truncate(length)
                if not length:
                    self._append(asdict(self.made_with))
            self._held = held_so_far.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the journal and release the lock. An unfinished journal is kept."""
        self._held.close()

    def add(self, descriptions: Sequence[Description]) -> None:
        """Append the descriptions of a group of videos to the journal and flush them to disk."""
        with self._writing(self.path):
            self._append([_plain(description) for description in descriptions])
        self._take(descriptions)

    def finish(self, order: Sequence[str]) -> None:
        """Write the file and remove the journal.

        Args:
            order: IDs of the videos in the order of the file; other videos already in the file come first.
        """
        asked = set(order)
        ids = [name for name in self._descriptions if name not in asked]
        ids += [name for name in order if name in self._descriptions]
        rows = [_plain(description) for name in ids for description in self._descriptions[name]]
        made: dict[str, Any] = {name: getattr(self.made_with, name) for name in ("model", "prompt", "weights_hash")}
        table = pa.Table.from_pylist([row | made for row in rows], schema=SCHEMA)
        table = table.replace_schema_metadata({SETTINGS: json.dumps(asdict(self.made_with)).encode()})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        with self._writing(self.out):
            write_whole(self.out, bytes(sink.getvalue()))
        self.path.unlink(missing_ok=True)

    def _append(self, entry: object) -> None:
        """Append a line to the journal and flush it to disk."""
        assert self._file is not None
        line = memoryview((json.dumps(entry) + "\n").encode())
        while line:  # a disk that becomes full first accepts a part
            line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror or error}. Earlier descriptions are kept. To resume, "
                f"{remedy(error)} and rerun the command."
            ) from error

    def _take(self, descriptions: Iterable[Description]) -> None:
        for description in descriptions:
            self._descriptions.setdefault(description.video_id, []).append(description)

    def _resume(self) -> int:
        """Read the complete lines of an unfinished journal and return their size in bytes."""
        content = self.path.read_bytes()
        length = content.rfind(b"\n") + 1
        lines = content[:length].decode("utf-8").splitlines()
        if not lines:
            return 0
        _check(self.path, json.loads(lines[0]), self.made_with)
        there = self.described  # possibly all of it, if the process was killed before it removed the journal
        for line in lines[1:]:
            self._take(found for entry in json.loads(line) if (found := Description(**entry)).video_id not in there)
        return length


def _read(path: Path, made_with: MadeWith) -> list[Description]:
    table = pq.read_table(path)
    settings = (table.schema.metadata or {}).get(SETTINGS)
    if settings is None:
        raise CaptionJournalError(
            f"{path} was not written by a captioner, so it is not overwritten. Choose another file with --out."
        )
    _check(path, json.loads(settings), made_with)
    return [Description(*(row[name] for name in _OWN)) for row in table.to_pylist()]


def _plain(description: Description) -> dict[str, Any]:
    return {name: getattr(description, name) for name in _OWN}


def _check(path: Path, found: dict[str, Any], made_with: MadeWith) -> None:
    wanted = asdict(made_with)
    different = [name for name in wanted if found.get(name) != wanted[name]]
    if different:
        name = different[0]
        raise CaptionJournalError(
            f"{path} contains descriptions made with {name} {found.get(name)!r}, not {wanted[name]!r}. Choose another "
            "file with --out, or resume with the same options."
        )
