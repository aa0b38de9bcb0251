"""VATEX: ten-second clips of Kinetics with ten English and ten Chinese captions each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import (
    Findings,
    Split,
    SplitBuilder,
    SplitName,
    VideoRecord,
    expect,
    field_of,
    read_json,
    read_lines,
)
from tvr_lightning.data.video_files import VideoFiles

CAPTIONS = {"en": "enCap", "zh": "chCap"}
CLIP = re.compile(r"(?P<youtube>.+)_(?P<start>\d{6})_(?P<end>\d{6})")  # greedy: YouTube IDs contain underscores


class VATEX(TextVideoDataModule):
    """VATEX (Wang et al., ICCV 2019) in the split of HGR: 25,991 / 1,500 / 1,500 clips, ten captions each.

    HGR (Chen et al., "Fine-grained video-text retrieval with hierarchical graph reasoning", CVPR 2020) divides the
    official validation clips into its validation and test sets, because the official test captions are withheld. IDs
    are `<youtube id>_<start>_<end>` in seconds. Evaluation uses all ten captions of a clip, and the best of them for
    video-to-text, or only the first one, as GAID does (`vatex_dataset.py`).
    https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/datasets/vatex_dataset.py#L25-L38

    Args:
        split: "hgr" is the only choice.
        annotations: source of the captions: HGR's `vatex_data.json`, or the two official files.
        language: language of the captions: English or Chinese.
        protocol: captions of a clip that are queries in evaluation: all, or only the first.
        **options: options of all datasets (`TextVideoDataModule`).
    """

    title = "VATEX"
    directory = "vatex"
    layout = """\
$TVR_DATA/vatex/
  {train,val,test}_list.txt                  HGR's lists: one id per line
  vatex_data.json                            for annotations hgr: {"<id>": {"enCap": [...], "chCap": [...]}}
  vatex_{training,validation}_v1.0.json      for annotations official: [{"videoID": ..., "enCap": [...]}, ...]
  videos/<id>.mp4 ..."""
    has_official_validation = True

    def __init__(
        self,
        *,
        split: Literal["hgr"] = "hgr",
        annotations: Literal["hgr", "official"] = "hgr",
        language: Literal["en", "zh"] = "en",
        protocol: Literal["multi-caption", "first-caption"] = "multi-caption",
        **options: Any,
    ) -> None:
        super().__init__(split=split, **options)
        self.annotations = annotations
        self.language = language
        self.protocol = protocol
        self._captions: dict[Path, dict[str, Any]] = {}

    @property
    def one_caption_evaluation(self) -> bool:
        """Whether the protocol uses only the first caption."""
        return self.protocol == "first-caption"

    def required_files(self, name: SplitName) -> list[Path]:
        """HGR's list and the file of captions."""
        official = "vatex_training_v1.0.json" if name == "train" else "vatex_validation_v1.0.json"
        captions = "vatex_data.json" if self.annotations == "hgr" else official
        return [self.folder / f"{name}_list.txt", self.folder / captions]

    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split, with the clips in the order of the list."""
        source, file = self.required_files(name)
        listed = read_lines(source)
        findings.duplicates(source, listed)
        captions = self._read_captions(file, findings)
        builder = SplitBuilder(source, findings)
        videos = VideoFiles(self.video_root, ".mp4")
        for clip in dict.fromkeys(listed):
            if CLIP.fullmatch(clip) is None:
                fix = "write <youtube id>_<start>_<end>, six digits each"
                findings.add(source, clip, "malformed", "no clip id", fix)
            sentences = self._sentences(file, clip, captions[clip]) if clip in captions else []
            if name != "train" and self.protocol == "first-caption":
                sentences = sentences[:1]
            builder.add(VideoRecord(clip, videos.find(clip)), sentences, file)
        count = "first caption of a clip" if self.protocol == "first-caption" else "ten captions per clip"
        tongue = "English" if self.language == "en" else "Chinese"
        return builder.build(name, f"HGR split, {count}, {tongue}")

    def _sentences(self, file: Path, clip: str, record: Any) -> list[str]:
        sentences = field_of(file, clip, record, CAPTIONS[self.language], list)
        return [expect(file, f"{clip}, caption {i}", text, str, "write a caption") for i, text in enumerate(sentences)]

    def _read_captions(self, file: Path, findings: Findings) -> dict[str, Any]:
        """Return the records of a captions file by ID."""
        if file not in self._captions:
            data = read_json(file)
            if self.annotations == "hgr":
                self._captions[file] = expect(file, "top level", data, dict, "write an object with an entry per clip")
            else:
                records = expect(file, "top level", data, list, "write a list of records")
                ids = [field_of(file, f"[{i}]", record, "videoID", str) for i, record in enumerate(records)]
                findings.duplicates(file, ids)
                if len(set(ids)) < len(ids):
                    return dict(zip(ids, records, strict=True))  # not cached, so that the next reader reports it too
                self._captions[file] = dict(zip(ids, records, strict=True))
        return self._captions[file]
