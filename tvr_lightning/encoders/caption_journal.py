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

Settings = dict[str, Any]
"""Settings that determine the descriptions: model, prompt, weights_hash, segments, and reading (the model's input)."""


@dataclass
class CaptionJournal:
    """Descriptions of a captions file and of the journal of an unfinished run, one group of videos per line.

    Attributes:
        out: Parquet file; its existing descriptions are kept.
        settings: Settings of the new descriptions.
        journal: Journal `<out>.unfinished`.
        descriptions: Rows of the file by video ID.
    """

    out: Path
    settings: Settings
    journal: Journal
    descriptions: dict[str, list[dict[str, Any]]]

    @classmethod
    @contextmanager
    def open(cls, out: Path, settings: Settings) -> Iterator[CaptionJournal]:
        """Lock the journal inside the context, and resume an unfinished run.

        Raises:
            UserError: The file or the journal contains descriptions with other settings, the file does not contain
                descriptions, another process writes it, or the disk is full or read-only.
        """
        file = out.with_name(out.name + ".unfinished")
        _read(out, settings)  # refuses another file before it creates a journal
        with Journal.open(file, settings, f"the captions {out}") as journal:
            _check(file, journal.header, settings)
            captions = cls(out, settings, journal, {})
            captions._take(_read(out, settings))
            there = set(captions.descriptions)  # all of them if the process was killed before it removed the journal
            captions._take(row for group in journal.entries for row in group if row["video_id"] not in there)
            yield captions

    def add(self, descriptions: Sequence[Description]) -> None:
        """Append the descriptions of a group of videos to the journal and flush them to disk."""
        rows = [asdict(description) for description in descriptions]
        self.journal.append(rows)
        self._take(rows)

    def finish(self, order: Sequence[str]) -> None:
        """Write the file with the videos in this order, after others that it contains, and remove the journal."""
        ids = [name for name in self.descriptions if name not in set(order)]
        ids += [name for name in order if name in self.descriptions]
        made = {name: self.settings[name] for name in ("model", "prompt", "weights_hash")}
        table = pa.Table.from_pylist([row | made for name in ids for row in self.descriptions[name]], schema=SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({SETTINGS: json.dumps(self.settings).encode()}), sink)
        with explain_write_errors(self.out, KEPT):
            write_whole(self.out, bytes(sink.getvalue()))
        self.journal.file.unlink(missing_ok=True)

    def _take(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self.descriptions.setdefault(row["video_id"], []).append(row)


def _read(path: Path, settings: Settings) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    table = pq.read_table(path)
    found = (table.schema.metadata or {}).get(SETTINGS)
    if found is None:
        raise UserError(
            f"{path} was not written by a captioner, so it is not overwritten. Choose another file with --out."
        )
    _check(path, json.loads(found), settings)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _check(path: Path, found: Settings, settings: Settings) -> None:
    for name, wanted in settings.items():
        if found.get(name) != wanted:
            raise UserError(
                f"{path} contains descriptions made with {name} {found.get(name)!r}, not {wanted!r}. Choose another "
                "file with --out, or resume with the same options."
            )
