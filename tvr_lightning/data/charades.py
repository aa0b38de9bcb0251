"""Charades: half-minute videos of people acting out scripts at home."""

import re
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, malformed, numbered_lines, read_table

MOMENT = re.compile(r"(?P<video>\S+) (?P<start>\d+(?:\.\d+)?) (?P<end>\d+(?:\.\d+)?)\s*##(?P<text>.*)")


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
    suffix = ".mp4"

    def __init__(self, *, split: Literal["scripts", "sta"] = "scripts", **options: Any) -> None:
        super().__init__(split=split, **options)
        self.one_caption_evaluation = split == "scripts"  # a span of Charades-STA can have several sentences

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        table = self.folder / f"Charades_v1_{name}.csv"
        return [table] if self.split == "scripts" else [self.folder / f"charades_sta_{name}.txt", table]

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        if self.split == "sta":
            return self._moments(name, findings)
        (table,) = self.required_files(name)
        rows = [(row["id"].strip(), row["script"]) for row in read_table(table, ["id", "script"])]
        # {} marks an empty text in the table
        scripts = {video: ["" if script.strip() == "{}" else script] for video, script in rows}
        ids = [video for video, _ in rows]
        return self.build_split(name, "scripts, one per video", scripts, findings, table, ids=ids)

    def _moments(self, name: SplitName, findings: Findings) -> Split:
        source, table = self.required_files(name)
        lengths = {}
        for row in read_table(table, ["id", "length"]):
            try:
                lengths[row["id"].strip()] = float(row["length"])
            except ValueError as error:
                message = f"length {row['length']!r} is not a number"
                raise malformed(table, row["id"], message, "write seconds") from error
        sentences: dict[str, list[str]] = {}
        spans: dict[str, tuple[float, float]] = {}
        for entry, line in numbered_lines(source):
            moment = MOMENT.fullmatch(line.strip())
            if moment is None:
                fix = "write <id> <start> <end>##<sentence>"
                findings.add(source, entry, "malformed", f"cannot be read: {line[:60]!r}", fix)
                continue
            video = moment["video"]
            if video not in lengths:
                message = f"sentence for {video}, which is not in {table.name}"
                findings.add(source, entry, "caption-without-video", message, "remove the line")
                continue
            given = float(moment["start"]), float(moment["end"])
            start, end = sorted(given)
            if start >= lengths[video] or start == end:  # outside the video, or empty
                start, end = 0.0, lengths[video]
            if (start, end) != given:
                message = f"the span {given[0]} to {given[1]} s of {video} is reversed or outside"
                findings.note(source, entry, "reversed-span", message, f"read as {start} to {end} s")
            item = f"{video}_{start:g}_{end:g}"
            spans[item] = start, end
            sentences.setdefault(item, []).append(moment["text"])
        return self.build_split(name, "Charades-STA, sentences to spans", sentences, findings, source, spans=spans)

    @override
    def find_video(self, video_id: str) -> Path:
        return super().find_video(video_id if self.split == "scripts" else video_id.rsplit("_", 2)[0])
