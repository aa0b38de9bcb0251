"""The file that descriptions of videos are written to: complete or absent, whatever happens on the way."""

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
from tvr_lightning.files import held, remedy, write_whole

SETTINGS = b"tvr_captions"


_OWN = ("video_id", "segment", "start", "end", "caption")  # the rest of a row is the same in the whole file


class CaptionJournalError(UserError, ValueError):
    """A captions file that does not fit what is to be written to it; says which option differs and what to do."""


@dataclass(frozen=True)
class MadeWith:
    """What descriptions depend on besides the videos.

    Attributes:
        model: hub name or folder. prompt: what the model was asked. weights_hash: of its weights.
        segments: N_s, parts of a video. reading: how a part was shown to the model, in words.
    """

    model: str
    prompt: str
    weights_hash: str
    segments: int
    reading: str


class CaptionJournal:
    """Collects descriptions in groups beside the file and makes the file of them in the end; use it as a context.

    A group is one line of the journal: a kill costs the group under way at most, and a line that was cut is ignored.
    One process at a time writes a file: it holds the lock `<file>.lock`.

    Attributes:
        described: ids of the videos described so far.

    Args:
        out: parquet file; videos described in it are kept.
        made_with: what the new descriptions depend on.

    Raises:
        CaptionJournalError: the file or an unfinished journal was made otherwise, or the file is none of descriptions.
        UserError: another process writes the file.
        UserError: the disk is full or not writable; entering, `add` and `finish` say so.
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
        """Ids of the videos described so far."""
        return set(self._descriptions)

    def __enter__(self) -> CaptionJournal:
        """Lock the file, read what is there, and open the journal for further groups, after its last whole line."""
        with ExitStack() as held_so_far:
            busy = UserError(f"Another process is writing the captions {self.out}. Wait for it or stop it.")
            lock = self.out.with_name(self.out.name + ".lock")
            with self._writing(lock):
                self.out.parent.mkdir(parents=True, exist_ok=True)
                held_so_far.enter_context(held(lock, busy, "do not start a second tvr caption with the same --out"))
            if self.out.is_file():
                self._take(_read(self.out, self.made_with))
            length = self._resume() if self.path.is_file() else 0
            with self._writing(self.path):
                # Without a buffer, closing it has nothing left to write, which would fail once more on a full disk.
                self._file = held_so_far.enter_context(self.path.open("ab", buffering=0))
                self._file.truncate(length)
                if not length:
                    self._append(asdict(self.made_with))
            self._held = held_so_far.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the journal and release the lock; the journal stays where the file was not finished."""
        self._held.close()

    def add(self, descriptions: Sequence[Description]) -> None:
        """Note the descriptions of a group of videos, safe from a kill once this returns."""
        with self._writing(self.path):
            self._append([_plain(description) for description in descriptions])
        self._take(descriptions)

    def finish(self, order: Sequence[str]) -> None:
        """Write the file and remove the journal.

        Args:
            order: ids of the videos in the order of the file; others that it held come first.
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
        """Put a line at the journal's end and onto the disk."""
        assert self._file is not None
        line = memoryview((json.dumps(entry) + "\n").encode())
        while line:  # a disk that fills up takes a part before it refuses
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
        """Read the whole lines of an unfinished journal; returns how many bytes they take."""
        content = self.path.read_bytes()
        length = content.rfind(b"\n") + 1
        lines = content[:length].decode("utf-8").splitlines()
        if not lines:
            return 0
        _check(self.path, json.loads(lines[0]), self.made_with)
        there = self.described  # the file may hold all of it: a kill came after the file and before the journal's end
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
