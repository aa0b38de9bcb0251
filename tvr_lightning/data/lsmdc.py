"""LSMDC: movie clips with sentences of the audio description for blind viewers."""

import re
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, numbered_lines, tidy

FILES: dict[SplitName, str] = {
    "train": "LSMDC16_annos_training.csv",
    "val": "LSMDC16_annos_val.csv",
    "test": "LSMDC16_challenge_1000_publictect.csv",
}
DROPPED = {
    "lsmdc16": (),
    "xpool": ("1012_Unbreakable_00.05.16.065-00.05.21.941",),
    "gaid": ("1012_Unbreakable_00.05.16.065-00.05.21.941", "1012_Unbreakable_00.24.58.622-00.25.06.004"),
}
"""Test clips that the released loaders omit, by split."""
CLIP = re.compile(r".+_\d{2}\.\d{2}\.\d{2}\.\d{3}-\d{2}\.\d{2}\.\d{2}\.\d{3}")


class LSMDC(TextVideoDataModule):
    """LSMDC 2016 (Rohrbach et al., "Movie description", IJCV 2017) with the challenge's 1,000 public test clips.

    101,079 sentences are for training, 7,408 for validation, and 1,000 for testing, with one sentence per test clip.
    Files are tab separated with six columns and no header: clip ID, four times, sentence. An ID can occur again with
    another sentence; both are used (CLIP4Clip's `dataloader_lsmdc_retrieval.py`), or the last one. IDs contain dots and
    begin with the name of the movie, which is also the name of its folder of clips.

    Args:
        split: "lsmdc16" for all clips and sentences. The other splits are those of released loaders, which train on the
            last sentence of a repeated ID and omit test clips: "xpool" (X-Pool and T-MASS) one clip, "gaid" two.
        **options: options of all datasets (`TextVideoDataModule`).
    """

    title = "LSMDC"
    directory = "lsmdc"
    layout = """\
$TVR_DATA/lsmdc/
  LSMDC16_annos_training.csv, LSMDC16_annos_val.csv    id, four times, sentence; tab separated, no header
  LSMDC16_challenge_1000_publictect.csv                the same, for the test
  videos/<movie>/<id>.avi ..."""
    suffix = ".avi"
    has_official_validation = True

    def __init__(self, *, split: Literal["lsmdc16", "xpool", "gaid"] = "lsmdc16", **options: Any) -> None:
        super().__init__(split=split, **options)

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        return [self.folder / FILES[name]]

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        source = self.folder / FILES[name]
        dropped = DROPPED[self.split] if name == "test" else ()
        sentences: dict[str, list[str]] = {}
        for entry, line in numbered_lines(source):
            columns = line.split("\t")
            clip = CLIP.fullmatch(columns[0].strip())
            if len(columns) != 6 or clip is None:
                message = f"{len(columns)} columns" if len(columns) != 6 else f"no clip id: {columns[0]!r}"
                fix = "write six columns separated by tabs, the first <movie>_HH.MM.SS.mmm-HH.MM.SS.mmm"
                findings.add(source, entry, "malformed", message, fix)
            elif name != "train" and tidy(columns[5]) in map(tidy, sentences.get(clip[0], [])):
                message = f"{clip[0]} occurs again with the same sentence"
                findings.add(source, entry, "duplicate-id", message, "remove the line")
            elif name == "train" and self.split != "lsmdc16":
                sentences[clip[0]] = [columns[5]]
            elif clip[0] not in dropped:
                sentences.setdefault(clip[0], []).append(columns[5])
        protocol = f"one sentence per clip, {1000 - len(dropped):,} public test clips"
        return self.build_split(name, protocol, sentences, findings, source)

    @override
    def find_video(self, video_id: str) -> Path:
        return super().find_video(f"{video_id.rpartition('_')[0]}/{video_id}")
