"""Your own videos with a table of captions."""

import hashlib
import os
import posixpath
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, expect, malformed, read_records
from tvr_lightning.data.video_files import VideoFiles
from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Range, Role

SUFFIXES = (".csv", ".jsonl", ".parquet")
VIDEO = ("file_name", "file", "video", "path", "video_path", "video_id")
CAPTION = re.compile(r"(caption|sentence|text)s?(_?\d+)?")
SPLITS = {"train": "train", "val": "val", "validation": "val", "test": "test"}
METADATA = "metadata"
"""Name of the table in Hugging Face's VideoFolder layout, without its suffix."""


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
    rows = []
    for position, record in records:
        name = expect(file, f"{position}, {video}", record.get(str(video)), str).strip()
        entry = f"{position}, {name}"
        if name.startswith("/"):  # the name is the video's ID, which must not depend on the machine
            fix = "keep the videos in the folder of the table, and write paths relative to it"
            raise malformed(file, entry, "the path is absolute", fix)
        split = record.get("split")
        row = CaptionRow(entry, posixpath.normpath(name), [], None if split is None else SPLITS.get(str(split).strip()))
        for column in captions:
            cell = record.get(column)
            for text in cell if isinstance(cell, list) else [cell]:
                if text is not None and (len(captions) == 1 or str(text).strip()):
                    row.captions.append(expect(file, f"{entry}, {column}", text, str))
        if split is not None and row.split is None:
            raise malformed(file, entry, f"no split {split!r}", f"write one of {', '.join(SPLITS)}")
        rows.append(row)
    return rows


class VideoFolder(TextVideoDataModule):
    """Folder of videos with a table of captions: captions.csv, captions.jsonl or captions.parquet.

    Without such a file, Hugging Face's layout is read: metadata.csv, metadata.jsonl or metadata.parquet in the folder
    of the videos, with the column `file_name`, relative to the table.
    All captions are used for training, and all captions of a test video are queries. A column `split` (train, val,
    test) assigns the videos to splits; without it, a share of them is selected for the test split by their
    names, regardless of their order. `root` is the folder itself.

    Args:
        split: "table" is the only choice.
        table: file name of the table; default: captions.csv, captions.jsonl or captions.parquet, or otherwise metadata
            with one of these suffixes.
        test_share: share of the videos in the test split, between 0 and 1, if the table has no column `split`.
        **options: options of all datasets (`TextVideoDataModule`).
    """

    title = "VideoFolder"
    directory = "folder"
    layout = """\
FOLDER/                                              data.init_args.root, or $TVR_DATA/folder
  captions.csv or captions.jsonl or captions.parquet   columns video, caption, and optionally split
  videos/<video> ...                                 or the videos next to the table
or metadata.csv, metadata.jsonl or metadata.parquet next to the videos, columns file_name, caption, optionally split"""
    one_caption_evaluation = False  # all captions are queries

    def __init__(
        self,
        *,
        split: Literal["table"] = "table",
        table: Annotated[str | None, Role.DATASET] = None,
        test_share: Annotated[float, Range(above=0, below=1), Role.DATASET] = 0.2,
        **options: Any,
    ) -> None:
        self.table = table
        self.test_share = test_share
        super().__init__(split=split, **options)

    @property
    @override
    def folder(self) -> Path:
        return Path(self.root).expanduser() if self.root else super().folder

    @property
    @override
    def video_root(self) -> Path:
        videos = self.folder / "videos"
        return videos if videos.is_dir() else self.folder

    @property
    @override
    def has_official_validation(self) -> bool:  # type: ignore[override]  # computed, since it needs the table
        try:
            return any(row.split == "val" for row in self._rows)
        except (UserError, OSError):  # reported when a split is read
            return False

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        if self.table is not None:
            return [self.folder / self.table]
        captions = [self.folder / f"captions{suffix}" for suffix in SUFFIXES]
        folders = dict.fromkeys((self.folder, self.video_root))
        metadata = [folder / f"{METADATA}{suffix}" for folder in folders for suffix in SUFFIXES]
        found = ([file for file in files if file.is_file()] for files in (captions, metadata))
        return next(filter(None, found), captions[:1])

    @cached_property
    def _table(self) -> Path:
        files = self.required_files("train")
        if len(files) > 1:
            names = ", ".join(file.relative_to(self.folder).as_posix() for file in files)
            choose = f"one table: {self.folder} contains {names}. Choose one with data.init_args.table"
            raise self.incomplete([choose])
        return files[0]

    @cached_property
    def _rows(self) -> list[CaptionRow]:
        """Rows of the table, with one name for all spellings of a file."""
        rows = read_caption_table(self._table)
        found = {spelling: self.find_video(spelling) for spelling in sorted({row.video for row in rows})}
        chosen = {path: spelling for spelling, path in found.items()}
        return [replace(row, video=chosen[found[row.video]]) for row in rows]

    @cached_property
    @override
    def video_files(self) -> VideoFiles:
        return VideoFiles(self.folder)

    @override
    def find_video(self, video_id: str) -> Path:
        """Return the path of a video: relative to `folder` if it contains a folder, otherwise in `video_root`.

        In Hugging Face's layout, every path is relative to the table.
        """
        base = self.folder if "/" in video_id else self.video_root
        base = self._table.parent if self._table.stem == METADATA else base
        return self.video_files.find(Path(os.path.relpath(base / video_id, self.folder)).as_posix())

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        captions: dict[str, list[str]] = {}
        for row in self._rows:
            captions.setdefault(row.video, []).extend(row.captions)
        table = self._table
        splits, drawn = self._splits(findings)
        if name not in splits.values():
            fix = "assign some rows to it, or remove the column to sample the test videos"
            raise malformed(table, "column split", f"no video is in the split {name!r}", fix)
        for file in sorted(self.video_files.unused):
            findings.note(table, file.name, "video-without-caption", f"does not name {file}", "left out")
        described = {video: texts for video, texts in captions.items() if splits[video] == name}
        return self.build_split(name, f"all captions of a video as queries{drawn}", described, findings, table)

    def _splits(self, findings: Findings) -> tuple[dict[str, str], str]:
        """Return the split of every video, and an addition to the protocol if the test videos are sampled."""
        marked: dict[str, dict[str | None, str]] = {}  # the first row of each split
        for row in self._rows:
            marked.setdefault(row.video, {}).setdefault(row.split, row.entry)
        if not any(split for named in marked.values() for split in named):
            # Sorted by digests of the names: independent of order and seed, and nearly unchanged by added videos.
            ordered = sorted(marked, key=lambda video: hashlib.sha256(os.fsencode(video)).digest())
            test = set(ordered[: max(1, round(self.test_share * len(ordered)))])
            drawn = f", {len(test)} of {len(marked)} videos sampled for the test by their names"
            return {video: "test" if video in test else "train" for video in marked}, drawn
        for video, named in marked.items():
            if len(named) > 1 or None in named:
                said = ", ".join(f"{split or 'no split'} ({entry})" for split, entry in named.items())
                findings.add(
                    self._table, video, "split-overlap", f"its rows are in {said}", "write one split in all of them"
                )
        return {video: next(iter(named)) or "" for video, named in marked.items()}, ""
