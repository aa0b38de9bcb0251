"""Additional descriptions of videos, written by `tvr caption` or by hand, and used by DPDV for training."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tvr_lightning.data.records import SHOWN, read_text
from tvr_lightning.errors import MissingAssetError, UserError

SCHEMA = pa.schema(
    [
        ("video_id", pa.string()),
        ("segment", pa.int32()),
        ("start", pa.float64()),
        ("end", pa.float64()),
        ("caption", pa.string()),
        ("model", pa.string()),
        ("prompt", pa.string()),
        ("weights_hash", pa.string()),
    ]
)
REQUIRED = ("video_id", "segment", "caption")
WITHOUT_MODEL = (
    "Create one with `tvr caption` and a vision-language model, or write a table by hand: a parquet file, CSV (.csv) "
    "or JSON Lines (.jsonl) with the columns video_id, segment (0, 1, ...), and caption, one row per description"
)
Row = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Description:
    """Description of one segment of a video.

    Attributes:
        video_id: Identifier in the annotation files of the dataset.
        segment: Number of the segment in temporal order, from 0.
        start: Start of the segment in seconds.
        end: End of the segment in seconds.
        caption: Text of the description.
        model: Author: the name of a model, or a person.
        prompt: Prompt of the model; empty for human authors.
        weights_hash: Hash of the model weights; empty for human authors.
    """

    video_id: str
    segment: int
    start: float
    end: float
    caption: str
    model: str = ""
    prompt: str = ""
    weights_hash: str = ""


@dataclass(frozen=True)
class RecoverCaptions:
    """Descriptions by video.

    Attributes:
        path: File of the descriptions, for errors.
        descriptions: Descriptions of each video ID in temporal order, without empty ones.
        empty: Number of empty descriptions in the file.
    """

    path: Path
    descriptions: dict[str, list[str]]
    empty: int = 0

    def __len__(self) -> int:
        """Return the number of videos with a description."""
        return sum(bool(described) for described in self.descriptions.values())

    def of(self, video_id: str) -> list[str]:
        """Return the descriptions of a video in temporal order; an empty list for a video that is not in the file."""
        return list(self.descriptions.get(video_id, []))

    def require(self, video_ids: Sequence[str]) -> None:
        """Check that each of these videos has a description."""
        absent = [video_id for video_id in video_ids if not self.descriptions.get(video_id)]
        if not absent:
            return
        if len(absent) == len(video_ids):
            known = ", ".join(list(self.descriptions)[:SHOWN])
            raise UserError(
                f"{self.path} describes none of the {len(video_ids)} training videos ({', '.join(absent[:SHOWN])}, "
                f"...), but others, such as {known}. Set data.init_args.extra_captions to the captions of this dataset."
            )
        more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        empty = f" ({self.empty} of its captions are empty)" if self.empty else ""
        raise UserError(
            f"{self.path}: {len(absent)} of the {len(video_ids)} training videos have no description{empty}: "
            f"{', '.join(absent[:SHOWN])}{more}. Describe them, too. ({WITHOUT_MODEL})"
        )


def find_captions(name: str, folder: Path) -> Path:
    """Return the captions file at the path `name`, or else at `name` in the dataset's folder."""
    paths = list(dict.fromkeys((Path(name).expanduser(), folder / name)))
    for path in paths:
        if path.is_file():
            return path
    checked = " and ".join(map(str, paths))
    raise MissingAssetError(f"no captions file {name}: looked for {checked}. {WITHOUT_MODEL}")


def read_captions(path: Path) -> RecoverCaptions:
    """Read a captions file.

    Args:
        path: Parquet file, or CSV (.csv) or JSON Lines (.jsonl) file in UTF-8, with the columns of `REQUIRED`; training
            does not need other columns.

    Raises:
        MissingAssetError: The file does not exist.
        UserError: The file cannot be used. The message contains the column and row.
    """
    if not path.is_file():
        raise MissingAssetError(f"no captions file: looked for {path}. {WITHOUT_MODEL}")
    readers = {".csv": _csv_rows, ".jsonl": _json_rows}
    rows = readers.get(path.suffix.lower(), _parquet_rows)(path)
    captions = {(video_id, segment): caption.strip() for video_id, segment, caption in rows}
    if len(captions) < len(rows):
        (video_id, segment), _ = Counter(row[:2] for row in rows).most_common(1)[0]
        raise UserError(
            f"{path}: segment {segment} of {video_id} is described more than once. Number the segments of a video "
            "0, 1, ..."
        )
    descriptions: dict[str, list[str]] = {}
    for (video_id, _), caption in sorted(captions.items()):
        descriptions.setdefault(video_id, []).extend([caption] if caption else [])
    if not any(descriptions.values()):
        raise UserError(f"{path}: the table contains no descriptions. {WITHOUT_MODEL}")
    return RecoverCaptions(path, descriptions, sum(not caption for caption in captions.values()))


def _parquet_rows(path: Path) -> list[Row]:
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a parquet file ({error}). {WITHOUT_MODEL}") from error
    _require_columns(path, table.column_names)
    columns = []
    for name in REQUIRED:
        expected = SCHEMA.field(name).type
        try:
            columns.append(table[name].cast(expected).to_pylist())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UserError(f"{path}: column {name} has another type than {expected}: {error}") from error
        if None in columns[-1]:
            raise _no_value(path, f"row {columns[-1].index(None)}", name)
    return list(zip(*columns, strict=True))


def _csv_rows(path: Path) -> list[Row]:
    """Read CSV, with rows numbered as in spreadsheets, where the header is row 1."""
    rows = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _require_columns(path, list(reader.fieldnames or []))
            for number, entry in enumerate(reader, 2):
                if None in entry:
                    fix = 'Put captions with commas in "quotes".'
                    raise UserError(f"{path}: row {number} has more values than the header has columns. {fix}")
                rows.append(_row(path, f"row {number}", entry))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as CSV, near row {len(rows) + 2}: {error}") from error
    return rows


def _json_rows(path: Path) -> list[Row]:
    """Read one JSON object per line; lines are numbered from 1, and empty ones are skipped."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}: row {number} is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise UserError(f"{path}: row {number} is not a JSON object with {', '.join(REQUIRED)}")
        rows.append(_row(path, f"row {number}", entry))
    return rows


def _require_columns(path: Path, names: Sequence[str]) -> None:
    absent = [name for name in REQUIRED if name not in names]
    if absent:
        raise UserError(f"{path}: no column {', '.join(absent)} among {', '.join(names)}. {WITHOUT_MODEL}")
    twice = [name for name in REQUIRED if names.count(name) > 1]
    if twice:
        raise UserError(f"{path}: the column {twice[0]} occurs twice. Keep one.")


def _no_value(path: Path, where: str, column: str) -> UserError:
    return UserError(f"{path}: {where} has no value in the column {column}. Add a value or remove the row.")


def _row(path: Path, where: str, entry: dict[str, Any]) -> Row:
    """Return a validated row of text or JSON values; only the caption may be empty."""
    for name in REQUIRED:
        if entry.get(name) is None or (name != "caption" and not str(entry[name]).strip()):
            raise _no_value(path, where, name)
    video_id, segment, caption = (entry[name] for name in REQUIRED)
    if not isinstance(caption, str):
        raise UserError(f"{path}: {where}, column caption: {caption!r} is not text")
    if not re.fullmatch(r"[0-9]{1,9}", str(segment).strip()):
        raise UserError(f"{path}: {where}, column segment: {segment!r} is not a whole number of at least 0")
    return str(video_id), int(segment), caption


def write_captions(path: Path, descriptions: Iterable[Description]) -> None:
    """Write a captions file; equal descriptions give equal bytes."""
    table = pa.Table.from_pylist([asdict(description) for description in descriptions], schema=SCHEMA)
    pq.write_table(table, path)
