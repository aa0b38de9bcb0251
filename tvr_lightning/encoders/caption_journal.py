"""Crash-safe writing of a captions file through a journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tvr_lightning.data.recover_captions import SCHEMA, Description
from tvr_lightning.errors import UserError
from tvr_lightning.files import Journal, explain_write_errors, write_whole

SETTINGS = b"tvr_captions"
KEPT = "Earlier descriptions are kept."
_OWN = ("video_id", "segment", "start", "end", "caption")  # the other columns are constant in a file


@dataclass(frozen=True)
class Provenance:
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


@dataclass
class CaptionJournal:
    """Descriptions of a captions file and of the journal of an unfinished run, one group of videos per line.

    Attributes:
        out: Parquet file; its existing descriptions are kept.
        provenance: Settings of the new descriptions.
        journal: Journal `<out>.unfinished`.
        descriptions: Descriptions by video ID.
    """

    out: Path
    provenance: Provenance
    journal: Journal
    descriptions: dict[str, list[Description]]

    @classmethod
    @contextmanager
    def open(cls, out: Path, provenance: Provenance) -> Iterator[CaptionJournal]:
        """Lock the journal inside the context, and resume an unfinished run.

        Raises:
            UserError: The file or the journal contains descriptions with other settings, the file does not contain
                descriptions, another process writes it, or the disk is full or read-only.
        """
        file = out.with_name(out.name + ".unfinished")
        busy = UserError(f"Another process is writing the captions {out}. Wait for it or stop it.")
        advice = "do not start a second tvr caption with the same --out"
        _read(out, provenance)  # refuses another file before it creates a journal
        with Journal.open(file, asdict(provenance), busy, advice, KEPT) as journal:
            _check(file, journal.header, provenance)
            found = cls(out, provenance, journal, {})
            found._take(_read(out, provenance))
            there = set(found.descriptions)  # possibly all, if the process was killed before it removed the journal
            rows = (Description(**row) for group in journal.entries for row in group)
            found._take(row for row in rows if row.video_id not in there)
            yield found

    def add(self, descriptions: Sequence[Description]) -> None:
        """Append the descriptions of a group of videos to the journal and flush them to disk."""
        self.journal.append([_plain(description) for description in descriptions])
        self._take(descriptions)

    def finish(self, order: Sequence[str]) -> None:
        """Write the file and remove the journal.

        Args:
            order: IDs of the videos in the order of the file; other videos already in the file come first.
        """
        asked = set(order)
        ids = [name for name in self.descriptions if name not in asked]
        ids += [name for name in order if name in self.descriptions]
        rows = [_plain(description) for name in ids for description in self.descriptions[name]]
        made: dict[str, Any] = {name: getattr(self.provenance, name) for name in ("model", "prompt", "weights_hash")}
        table = pa.Table.from_pylist([row | made for row in rows], schema=SCHEMA)
        table = table.replace_schema_metadata({SETTINGS: json.dumps(asdict(self.provenance)).encode()})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        with explain_write_errors(self.out, KEPT):
            write_whole(self.out, bytes(sink.getvalue()))
        self.journal.file.unlink(missing_ok=True)

    def _take(self, descriptions: Iterable[Description]) -> None:
        for description in descriptions:
            self.descriptions.setdefault(description.video_id, []).append(description)


def _read(path: Path, provenance: Provenance) -> list[Description]:
    if not path.is_file():
        return []
    table = pq.read_table(path)
    settings = (table.schema.metadata or {}).get(SETTINGS)
    if settings is None:
        raise UserError(
            f"{path} was not written by a captioner, so it is not overwritten. Choose another file with --out."
        )
    _check(path, json.loads(settings), provenance)
    return [Description(*(row[name] for name in _OWN)) for row in table.to_pylist()]


def _plain(description: Description) -> dict[str, Any]:
    return {name: getattr(description, name) for name in _OWN}


def _check(path: Path, found: dict[str, Any], provenance: Provenance) -> None:
    for name, wanted in asdict(provenance).items():
        if found.get(name) != wanted:
            raise UserError(
                f"{path} contains descriptions made with {name} {found.get(name)!r}, not {wanted!r}. Choose another "
                "file with --out, or resume with the same options."
            )
