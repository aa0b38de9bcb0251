"""Tables of captions with one row per caption or per video, as CSV, JSON Lines or Parquet."""

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvr_lightning.data.records import expect, malformed, read_table, read_text

SUFFIXES = (".csv", ".jsonl", ".parquet")
VIDEO = ("file_name", "file", "video", "path", "video_path", "video_id")
CAPTION = re.compile(r"(caption|sentence|text)s?(_?\d+)?")
SPLITS = {"train": "train", "val": "val", "validation": "val", "test": "test"}


@dataclass(frozen=True, slots=True)
class CaptionRow:
    """Captions of a video in one row of a table.

    `entry` is the position of the row in the file, for messages, and `video` the name of the file, without `./` and
    `..` inside it. `split` is None if the table has no such column.
    """

    entry: str
    video: str
    captions: list[str]
    split: str | None


def read_caption_table(file: Path) -> list[CaptionRow]:
    """Return the rows of a table in file order.

    The video is in the first existing column of `VIDEO`. Captions are in all columns named caption, sentence or text,
    in singular or plural, optionally numbered (`caption1`, `caption_2`). A cell may contain a list of captions, and
    with several caption columns, some cells may be empty.
    """
    records = read_records(file)
    columns = list(dict.fromkeys(name for _, record in records for name in record))
    video = next((name for name in VIDEO if name in columns), None)
    captions = [name for name in columns if CAPTION.fullmatch(name)]
    for found, what, names in ((video, "the video", ", ".join(VIDEO)), (captions, "captions", "caption, caption1")):
        if not found and records:
            message = f"no column contains {what}, found {columns}"
            raise malformed(file, "columns", message, f"name it one of {names}")
    return [_row(file, entry, record, str(video), captions) for entry, record in records]


def _row(file: Path, entry: str, record: Mapping[str, Any], video: str, columns: list[str]) -> CaptionRow:
    name = expect(file, f"{entry}, {video}", record.get(video), str).strip()
    entry = f"{entry}, {name}"
    captions = []
    for column in columns:
        cell = record.get(column)
        for text in cell if isinstance(cell, list) else [cell]:
            if text is not None and (len(columns) == 1 or str(text).strip()):
                captions.append(expect(file, f"{entry}, {column}", text, str))
    split = record.get("split")
    if split is not None and str(split).strip() not in SPLITS:
        raise malformed(file, entry, f"no split {split!r}", f"write one of {', '.join(SPLITS)}")
    return CaptionRow(entry, posixpath.normpath(name), captions, None if split is None else SPLITS[str(split).strip()])


def read_records(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the records of a CSV, JSON Lines or Parquet file, each with its position for messages."""
    if file.suffix.lower() == ".csv":
        rows: list[Any] = list(read_table(file, ()))
        return [(f"row {number}", row) for number, row in enumerate(rows, start=2)]
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise malformed(file, "whole file", f"not a parquet file ({error})", "write it again") from error
        return [(f"row {number}", row) for number, row in enumerate(rows)]
    records = []
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        entry = f"line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise malformed(file, entry, f"not JSON ({error.msg})", "write one object per line") from error
        records.append((entry, expect(file, entry, record, dict)))
    return records
