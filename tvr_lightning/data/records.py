"""Contents of annotation files: splits of videos and texts, and the problems found while reading them."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tvr_lightning.errors import UserError
from tvr_lightning.media.sampling import Span

SplitName = Literal["train", "val", "test"]
SYNTHETIC_FILE = "SYNTHETIC.txt"
"""File in the folder of a dataset that `tvr data synth` wrote."""
SYNTHETIC = "synthetic data, not comparable with published results"
"""Warning of every result on a synthetic dataset."""
FIX = "fix the file, or download it again"


@dataclass(frozen=True, slots=True)
class VideoRecord:
    """One video of a split: its file (expected if missing), and the span in seconds if it is a part of the file."""

    video_id: str
    path: Path
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class TextRecord:
    """One text of a split and the index in `Split.videos` of the video it describes."""

    text: str
    video: int


@dataclass(frozen=True, slots=True)
class Split:
    """One split of a dataset, with M unique videos and N texts.

    `protocol` is the protocol under which results on this dataset are published; it is part of every result file.
    """

    name: SplitName
    protocol: str
    videos: list[VideoRecord]
    texts: list[TextRecord]

    def texts_of_videos(self) -> list[list[int]]:
        """Return the indices of the texts of every video, in file order, as M lists of integers."""
        groups: list[list[int]] = [[] for _ in self.videos]
        for index, text in enumerate(self.texts):
            groups[text.video].append(index)
        return groups

    def take_videos(self, chosen: Sequence[int]) -> Split:
        """Return a split with the videos at the indices `chosen`, in that order, and their texts in file order."""
        new_index = {old: new for new, old in enumerate(chosen)}
        texts = [replace(text, video=new_index[text.video]) for text in self.texts if text.video in new_index]
        return Split(self.name, self.protocol, [self.videos[old] for old in chosen], texts)


def shared_videos(one: Split, other: Split) -> list[VideoRecord]:
    """Return the videos of `one` whose files are also in `other`, one per file."""
    files = {video.path for video in other.videos}
    return list({video.path: video for video in one.videos if video.path in files}.values())


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a dataset: its file, entry, kind (such as "empty-caption") and message, and the fix."""

    file: str
    entry: str
    kind: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}: {self.entry}: {self.message}; {self.fix}"


class AnnotationError(UserError):
    """Error for annotation files that contradict themselves or their format; `problems` lists all findings."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems[:5]]
        if len(self.problems) > 5:
            lines.append(f"and {len(self.problems) - 5} more problems (`tvr data check` lists all of them)")
        super().__init__("\n".join(lines))


@dataclass
class Findings:
    """Collector of the problems in annotation files, so that one pass reports all of them.

    `notes` are known quirks of the released files; the documentation of the dataset describes how they are read.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    def add(self, file: Path, entry: str, kind: str, message: str, fix: str) -> None:
        """Add one problem."""
        self.problems.append(Problem(str(file), entry, kind, message, fix))

    def note(self, file: Path, entry: str, kind: str, message: str, reading: str) -> None:
        """Add a known quirk and how it is read."""
        self.notes.append(Problem(str(file), entry, kind, message, reading))


def duplicates(file: Path, names: Iterable[str], what: str = "id") -> list[Problem]:
    """Return a problem for every name that occurs more than once."""
    fix = "keep one entry and remove the rest"
    repeated = {name: count for name, count in Counter(names).items() if count > 1}
    return [Problem(str(file), n, "duplicate-id", f"the {what} occurs {c} times", fix) for n, c in repeated.items()]


def malformed(file: Path, entry: str, message: str, fix: str) -> AnnotationError:
    """Return the error for a file that cannot be parsed further."""
    return AnnotationError([Problem(str(file), entry, "malformed", message, fix)])


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file without a byte-order mark, with newlines as line endings."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise malformed(file, f"byte {error.start}", "not UTF-8 text", "save the file as UTF-8") from error


def numbered_lines(file: Path) -> list[tuple[str, str]]:
    """Return the lines of a text file that are not blank, each with its position for messages."""
    lines = enumerate(read_text(file).split("\n"), start=1)
    return [(f"line {number}", line) for number, line in lines if line.strip()]


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file that are not blank without surrounding white space."""
    return [line.strip() for _, line in numbered_lines(file)]


def read_json(file: Path, shape: Any) -> Any:
    """Return a parsed JSON file of a `shape` (see `expect`), in which no object contains the same key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            raise AnnotationError(duplicates(file, (key for key, _ in pairs), "key"))
        return mapping

    try:
        value = json.loads(read_text(file), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise malformed(file, f"line {error.lineno} column {error.colno}", f"not JSON ({error.msg})", FIX) from error
    except RecursionError as error:
        raise malformed(file, "whole file", "nested too deeply", FIX) from error
    return expect(file, "", value, shape)


def read_table(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a strictly valid CSV file with a header, which contains `columns`, as dicts by column."""
    return [row for _, row in _numbered_rows(file, columns)]


def _numbered_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file after its header that are not blank, with their numbers in the file."""
    # newline="": a quoted field may contain line endings as part of the text, and only the csv reader detects them
    reader = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    rows = []
    start = 1
    try:
        for number, row in enumerate(reader, start=1):
            if any(cell.strip() for cell in row):
                rows.append((number, row))
            start = reader.line_num + 1
    except csv.Error as error:
        fix = "close every quote, and write a quote inside a quoted field twice"
        raise malformed(file, f"line {start}", f"not CSV: {error}", fix) from error
    header = [name.strip() for name in rows[0][1]] if rows else []
    if repeated := duplicates(file, header, "column"):
        raise AnnotationError(repeated)
    for name in columns:
        if name not in header:
            fix = f"the first line must name the columns {', '.join(columns)}"
            raise malformed(file, "header", f"column {name!r} is missing, found {header}", fix)
    for number, row in rows[1:]:
        if len(row) != len(header):
            message = f"{len(row)} fields, but the header has {len(header)}"
            raise malformed(file, f"row {number}", message, "quote fields that contain commas")
        yield number, dict(zip(header, row, strict=True))


def read_records(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the records of a CSV, JSON Lines or Parquet file, each with its position for messages."""
    if file.suffix.lower() == ".csv":
        return [(f"row {number}", row) for number, row in _numbered_rows(file, ())]
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise malformed(file, "whole file", f"not a parquet file ({error})", "write it again") from error
        return [(f"row {number}", row) for number, row in enumerate(rows)]
    records = []
    for entry, line in numbered_lines(file):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise malformed(file, entry, f"not JSON ({error.msg})", "write one object per line") from error
        records.append((entry, expect(file, entry, record, dict)))
    return records


def expect(file: Path, entry: str, value: Any, shape: Any) -> Any:
    """Return a parsed value, the `entry` of a file ("" for all of it), which must have a shape.

    A shape is a type, such as `str`; a list `[shape]`; an object `{"key": shape}`, which may contain further keys; or
    an object `{str: shape}` with any keys.
    """
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if not isinstance(value, kind):
        message = f"expected {kind.__name__}, found {type(value).__name__}"
        raise malformed(file, entry or "top level", message, FIX)
    if isinstance(shape, list):
        for number, item in enumerate(value):
            expect(file, f"{entry}[{number}]", item, shape[0])
    if isinstance(shape, dict):
        for key in value if str in shape else shape:
            expect(file, f"key {key!r}", key, str)
            if key not in value:
                message = f"the key {key!r} is missing, found {sorted(value)}"
                raise malformed(file, entry or "top level", message, FIX)
            expect(file, f"{entry}, {key}" if entry else key, value[key], shape.get(str) or shape[key])
    return value


def tidy(text: str) -> str:
    """Return the text with every run of white space or line endings replaced by one space, as in CLIP's tokenizer."""
    return " ".join(text.split())


def hold_out(train: Split, videos: int, seed: int, one_caption: bool) -> tuple[Split, Split]:
    """Divide a training split into a training split and a validation split "val" without shared video files.

    `videos` is the number of files to hold out; clips of one file are held out together. With `one_caption`, only the
    first text of a held-out video is kept, as in the test protocol.
    """
    files = np.array(list(dict.fromkeys(video.path for video in train.videos)))
    if videos >= len(files):
        raise UserError(f"holdout {videos} leaves no training videos of {len(files)}; hold out fewer")
    drawn = set(files[np.random.default_rng([seed, len(files)]).permutation(len(files))[:videos]])
    held = train.take_videos([i for i, video in enumerate(train.videos) if video.path in drawn])
    rest = train.take_videos([i for i, video in enumerate(train.videos) if video.path not in drawn])
    texts = [held.texts[indices[0]] for indices in held.texts_of_videos()] if one_caption else held.texts
    return rest, Split("val", f"{train.protocol}, {videos} training videos held out", held.videos, texts)
