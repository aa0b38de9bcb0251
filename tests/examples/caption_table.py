"""CaptionTable: videos of one's own with a table of captions, as an example of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitBuilder, SplitName, VideoRecord, read_table
from tvr_lightning.data.video_files import VideoFolder


class CaptionTable(TextVideoDataModule):
    """Videos in one folder and a file captions.csv with the columns split, video and caption.

    A video with several rows has several captions, and every one of a test video is a query.

    Args:
        split: "table", the column of that name.
        **options: shared by all datasets, `frames` and `words` among them; see `TextVideoDataModule`.
    """

    title = "CaptionTable"
    directory = "caption-table"
    layout = """\
$TVR_DATA/caption-table/
  captions.csv      split,video,caption      split is train or test, video the name of a file
  videos/<video> ..."""

    def __init__(self, *, split: Literal["table"] = "table", frames: int = 12, words: int = 32, **options: Any) -> None:
        super().__init__(split=split, frames=frames, words=words, **options)

    @property
    def has_official_validation(self) -> bool:
        """False: `holdout` takes videos from training, or the test split is validated on."""
        return False

    @property
    def one_caption_evaluation(self) -> bool:
        """False: all captions are queries."""
        return False

    def required_files(self, name: SplitName) -> list[Path]:
        """The table."""
        return [self.folder / "captions.csv"]

    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split: its videos in the order in which the table first names them."""
        (table,) = self.required_files(name)
        said: dict[str, list[str]] = {}
        for row in read_table(table, ("split", "video", "caption")):
            if row["split"].strip() == name:
                said.setdefault(row["video"].strip(), []).append(row["caption"])
        videos, builder = VideoFolder(self.video_root), SplitBuilder(table, findings)
        for video, captions in said.items():
            builder.add(VideoRecord(video, videos.find(video)), captions, table)
        return builder.build(name, "all captions of a video as queries")
