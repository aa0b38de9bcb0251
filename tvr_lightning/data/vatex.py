"""VATEX: ten-second clips of Kinetics with ten English and ten Chinese captions each."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, duplicates, read_json, read_lines
from tvr_lightning.option_types import Role

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
    suffix = ".mp4"
    has_official_validation = True

    def __init__(
        self,
        *,
        split: Literal["hgr"] = "hgr",
        annotations: Annotated[Literal["hgr", "official"], Role.DATASET] = "hgr",
        language: Annotated[Literal["en", "zh"], Role.DATASET] = "en",
        protocol: Annotated[Literal["multi-caption", "first-caption"], Role.EVALUATION, Role.DATASET] = "multi-caption",
        **options: Any,
    ) -> None:
        super().__init__(split=split, **options)
        self.annotations = annotations
        self.language = language
        self.one_caption_evaluation = protocol == "first-caption"
        self._captions: dict[Path, list[tuple[str, list[str]]]] = {}

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        official = "vatex_training_v1.0.json" if name == "train" else "vatex_validation_v1.0.json"
        captions = "vatex_data.json" if self.annotations == "hgr" else official
        return [self.folder / f"{name}_list.txt", self.folder / captions]

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        source, file = self.required_files(name)
        listed = read_lines(source)
        for clip in listed:
            if CLIP.fullmatch(clip) is None:
                fix = "write <youtube id>_<start>_<end>, six digits each"
                findings.add(source, clip, "malformed", "no clip id", fix)
        key = CAPTIONS[self.language]
        hgr = self.annotations == "hgr"
        if file not in self._captions:
            found = read_json(file, {str: {key: [str]}} if hgr else [{"videoID": str, key: [str]}])
            records = found.items() if hgr else ((record["videoID"], record) for record in found)
            self._captions[file] = [(clip, record[key]) for clip, record in records]
        findings.problems += duplicates(file, (clip for clip, _ in self._captions[file]))
        first = self.one_caption_evaluation
        kept = 1 if first and name != "train" else None
        captions = {clip: texts[:kept] for clip, texts in self._captions[file]}
        count = "first caption of a clip" if first else "ten captions per clip"
        protocol = f"HGR split, {count}, {'English' if self.language == 'en' else 'Chinese'}"
        return self.build_split(name, protocol, captions, findings, source, file=file, ids=listed)
