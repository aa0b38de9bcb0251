"""Order of the rows and columns of score matrices: that of a test split, or of a table of texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tvr_lightning.data.records import Split, TextRecord, VideoRecord, malformed, read_records, tidy

VIDEO_COLUMNS = ("video_id", "video", "video_name", "vid", "clip_id", "clip_name")
TEXT_COLUMNS = ("sentence", "text", "caption", "query", "description")
KEY_COLUMNS = ("text_id", "query_id", "sentence_id", "key")


@dataclass
class MatrixLayout:
    """Texts and videos of score matrices (N, M).

    Attributes:
        split: The N texts and M videos, in the order of the results.
        where: Name of the rows and columns in messages.
        names: IDs of the videos in the columns.
        keys: Row of each name of a text: its number from 0, and its ID if the table has one.
        rows: Row of each text of the split, (N,) int64.
        columns: Column of each video of the split, (M,) int64.
        left_out: Number of texts of the dataset that the table does not list.
    """

    split: Split
    where: str
    names: Sequence[str]
    keys: dict[str, int]
    rows: Tensor
    columns: Tensor
    left_out: int = 0

    @property
    def video_of_text(self) -> Tensor:
        """Index of each text's video in the split, (N,) int64."""
        return torch.tensor([text.video for text in self.split.texts], dtype=torch.int64)


def layout_of(split: Split, where: str) -> MatrixLayout:
    """Return the layout of matrices in the order of a split."""
    rows, columns = torch.arange(len(split.texts)), torch.arange(len(split.videos))
    names = [video.video_id for video in split.videos]
    return MatrixLayout(split, where, names, {str(row): row for row in rows.tolist()}, rows, columns)


def read_layout(file: Path, known: Split | None = None, where: str = "") -> MatrixLayout:
    """Read a table (CSV, JSON Lines, or Parquet) with one row per row of the matrices.

    One of VIDEO_COLUMNS contains the ID of the text's video; columns of the matrices are in the order in which these
    first appear. One of TEXT_COLUMNS contains the text, and one of KEY_COLUMNS its ID. Without either, texts are
    numbered. With a `known` split, named `where` in messages, results are in its order. Raises UserError if a column or
    an ID is missing, unknown, or repeated.
    """
    records = read_records(file)
    if not records:
        raise malformed(file, "whole file", "no rows", "write one row per text, with the column video_id")

    def column_of(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in records[0][1]), None)

    video_column, text_column, key_column = map(column_of, (VIDEO_COLUMNS, TEXT_COLUMNS, KEY_COLUMNS))
    if video_column is None:
        found = ", ".join(map(str, records[0][1]))
        message = f"the column with the ID of each text's video is missing, found {found}"
        raise malformed(file, "header", message, f"name it {', '.join(VIDEO_COLUMNS[:-1])}, or {VIDEO_COLUMNS[-1]}")
    places: dict[str, int] = {}
    texts = []
    keys: dict[str, int] = {}
    for row, (entry, record) in enumerate(records):
        given = record.get(video_column)
        video = "" if given is None else str(given).strip()
        if not video:
            raise malformed(file, entry, f"no {video_column}", "add the ID of the text's video")
        if key_column is not None and keys.setdefault(str(record.get(key_column)), row) != row:
            raise malformed(file, entry, f"{key_column} {record.get(key_column)!r} occurs twice", "keep one of them")
        text = "" if text_column is None else tidy(str(record.get(text_column) or ""))
        texts.append(TextRecord(text or f"text {row}", places.setdefault(video, len(places))))
    split = Split("test", f"texts of {file.name}", [VideoRecord(name, Path()) for name in places], texts)
    layout = layout_of(split, file.name)
    # Row numbers are names too, unless they are the IDs of other rows.
    numbered = all(layout.keys.get(key, row) == row for key, row in keys.items())
    layout.keys = layout.keys | keys if numbered else keys
    return layout if known is None else _in_split(layout, [entry for entry, _ in records], file, known, where)


def _in_split(layout: MatrixLayout, entries: Sequence[str], file: Path, known: Split, where: str) -> MatrixLayout:
    """Return the layout of the same matrices for results in the order of a dataset's split."""
    ids = [video.video_id for video in known.videos]
    stems = [name.rpartition(".")[0] for name in ids]  # some tables omit the suffix
    numbered = {stem: place for place, stem in enumerate(stems) if stem}
    numbered |= {name: place for place, name in enumerate(ids)}
    left = known.texts_of_videos()
    single = len(known.texts) == len(known.videos)
    videos: dict[int, int] = {}  # place in the split by column
    chosen: list[int] = []
    for entry, record in zip(entries, layout.split.texts, strict=True):
        name = layout.names[record.video]
        if name not in numbered:
            fix = f"use the IDs of {where}, such as {ids[0]!r}, or pass --ids without a dataset"
            raise malformed(file, entry, f"video {name!r} is not in {where}", fix)
        place = videos.setdefault(record.video, numbered[name])
        unnamed = record.text == f"text {len(chosen)}"  # if the table has no texts
        same = [text for text in left[place] if single or unnamed or tidy(known.texts[text].text) == record.text]
        if not same:
            problem = "occurs twice" if single else f"has another row with this text, or {where} has another text"
            raise malformed(file, entry, f"video {name!r} {problem}", "write one row per text of the split")
        left[place].remove(same[0])
        chosen.append(same[0])
    rows, columns = (torch.tensor(each).argsort() for each in (chosen, list(videos.values())))
    kept = known.take_videos(sorted(videos.values()))
    index_of = {video: index for index, video in enumerate(sorted(videos.values()))}
    texts = [TextRecord(known.texts[text].text, index_of[known.texts[text].video]) for text in sorted(chosen)]
    split = Split(known.name, known.protocol, kept.videos, texts)
    return MatrixLayout(split, file.name, layout.names, layout.keys, rows, columns, len(known.texts) - len(chosen))
