"""Charades: half-minute videos of people acting out scripts at home."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import (
    Findings,
    Split,
    SplitName,
    VideoRecord,
    build_split,
    malformed,
    read_lines,
    read_table,
)
from tvr_lightning.data.video_files import VideoFiles

MOMENT = re.compile(r"(?P<video>\S+) (?P<start>\d+(?:\.\d+)?) (?P<end>\d+(?:\.\d+)?)\s*##(?P<text>.*)")
Span = tuple[float, float]


class Charades(TextVideoDataModule):
    """Charades (Sigurdsson et al., "Hollywood in homes", ECCV 2016): scripts, or the sentences of Charades-STA.

    "scripts" is the retrieval protocol of EclipSE (Lin et al., ECCV 2022; `dataloader_charades_retrieval.py`): 7,985
    training and 1,863 test videos, each with the script that was acted. "sta" (Gao et al., "TALL: temporal activity
    localization via language query", ICCV 2017) has 12,408 and 3,720 sentences about spans of these videos. The
    retrieved item is a span, and several sentences can describe it. Neither has a validation split: papers validate
    on the test set; `holdout` holds out training videos instead.

    Four sentences of Charades-STA have a span that ends before it starts; its ends are swapped. A span that begins
    after the end of its video is replaced by the whole video.

    Args:
        split: "scripts" or "sta" (Charades-STA).
        **options: options of all datasets (`TextVideoDataModule`).
    """

    title = "Charades"
    directory = "charades"
    layout = """\
$TVR_DATA/charades/
  Charades_v1_train.csv, Charades_v1_test.csv    columns id, script, length
  charades_sta_train.txt, charades_sta_test.txt  for split sta: <id> <start> <end>##<sentence>
  videos/<id>.mp4 ..."""
    has_official_validation = False

    def __init__(self, *, split: Literal["scripts", "sta"] = "scripts", **options: Any) -> None:
        super().__init__(split=split, **options)

    @property
    def one_caption_evaluation(self) -> bool:
        """True for scripts; a span of Charades-STA can have several sentences."""
        return self.split == "scripts"

    def required_files(self, name: SplitName) -> list[Path]:
        """Table of videos, and the file of sentences for Charades-STA."""
        table = self.folder / f"Charades_v1_{name}.csv"
        return [table] if self.split == "scripts" else [self.folder / f"charades_sta_{name}.txt", table]

    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split, with a video per row of the table or an item per span in the order of the first sentences."""
        if self.split == "scripts":
            return self._parse_scripts(name, findings)
        return self._parse_spans(name, findings)

    def _parse_scripts(self, name: SplitName, findings: Findings) -> Split:
        source = self.folder / f"Charades_v1_{name}.csv"
        rows = read_table(source, ["id", "script"])
        ids = [row["id"].strip() for row in rows]
        findings.duplicates(source, ids)
        videos = VideoFiles(self.video_root, ".mp4")
        items = [
            # {} marks an empty text in the table
            (VideoRecord(video, videos.find(video)), ["" if row["script"].strip() == "{}" else row["script"]])
            for video, row in zip(ids, rows, strict=True)
        ]
        return build_split(name, "scripts, one per video", items, findings, source)

    def _parse_spans(self, name: SplitName, findings: Findings) -> Split:
        source, table = self.required_files(name)
        lengths = {}
        for row in read_table(table, ["id", "length"]):
            try:
                lengths[row["id"].strip()] = float(row["length"])
            except ValueError as error:
                message = f"length {row['length']!r} is not a number"
                raise malformed(table, row["id"], message, "write seconds") from error
        sentences: dict[tuple[str, Span], list[str]] = {}
        for number, line in enumerate(read_lines(source), start=1):
            entry = f"line {number}"
            moment = MOMENT.fullmatch(line)
            if moment is None:
                fix = "write <id> <start> <end>##<sentence>"
                findings.add(source, entry, "malformed", f"cannot be read: {line[:60]!r}", fix)
            elif moment["video"] not in lengths:
                message = f"sentence for {moment['video']}, which is not in {table.name}"
                findings.add(source, entry, "caption-without-video", message, "remove the line")
            else:
                given = float(moment["start"]), float(moment["end"])
                span = _valid_span(given, lengths[moment["video"]])
                if span != given:
                    message = f"the span {given[0]} to {given[1]} s of {moment['video']} is reversed or outside"
                    findings.note(source, entry, "reversed-span", message, f"read as {span[0]} to {span[1]} s")
                sentences.setdefault((moment["video"], span), []).append(moment["text"])
        videos = VideoFiles(self.video_root, ".mp4")
        items = [
            (VideoRecord(f"{video}_{span[0]:g}_{span[1]:g}", videos.find(video), span), texts)
            for (video, span), texts in sentences.items()
        ]
        return build_split(name, "Charades-STA, sentences to spans", items, findings, source)


def _valid_span(span: Span, length: float) -> Span:
    """Return a span with its ends in order, or the whole video if the span is outside it or empty."""
    start, end = min(span), max(span)
    if start >= length or start == end:
        return 0.0, length
    return start, end
