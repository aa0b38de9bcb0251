"""MSR-VTT: 10,000 web videos with twenty captions each."""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Problem, Split, SplitName, duplicates, read_json, read_table


class MSRVTT(TextVideoDataModule):
    """MSR-VTT (Xu et al., CVPR 2016) in the three splits used in retrieval papers.

    "9k" and "7k" train on 9,000 or 7,010 videos, with each of their twenty captions as a sample, and test on the 1k-A
    set: 1,000 videos with one caption each (Yu et al., "A joint sequence fusion model for video question answering
    and retrieval", ECCV 2018; the 9k list is from Gabeur et al., ECCV 2020). They have no validation split: papers
    validate on the test set; `holdout` holds out training videos instead. "full" is the official 6,513 / 497 / 2,990
    split, evaluated with all twenty captions. File names are those of CLIP4Clip's data package. Sentences of the 1k-A
    file are used unchanged: 35 of them differ from the JSON file in spacing or punctuation.

    Args:
        split: "9k" (9,000 training videos) or "7k" (7,010), both tested on 1k-A; or "full" (6,513 / 497 / 2,990).
        **options: options of all datasets (`TextVideoDataModule`).
    """

    title = "MSR-VTT"
    directory = "msrvtt"
    layout = """\
$TVR_DATA/msrvtt/
  MSRVTT_data.json                          all captions: {"videos": [...], "sentences": [...]}
  MSRVTT_train.9k.csv, MSRVTT_train.7k.csv  for split 9k or 7k: column video_id
  MSRVTT_JSFUSION_test.csv                  for split 9k or 7k: columns video_id, sentence
  MSRVTT_{train,val,test}.full.csv          for split full: column video_id
  videos/video0.mp4 ..."""
    suffix = ".mp4"

    def __init__(self, *, split: Literal["9k", "7k", "full"] = "9k", **options: Any) -> None:
        self.has_official_validation = split == "full"
        self.one_caption_evaluation = split != "full"
        self.training_set = None if split == "full" else split
        super().__init__(split=split, **options)

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        if self.split != "full" and name == "test":
            return [self.folder / "MSRVTT_JSFUSION_test.csv"]
        return [self.folder / "MSRVTT_data.json", self.folder / f"MSRVTT_{name}.{self.split}.csv"]

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        file, source = self.required_files(name)[0], self.required_files(name)[-1]
        pairs = file == source  # of the 1k-A test
        rows = read_table(source, ["video_id", "sentence"] if pairs else ["video_id"])
        ids = [row["video_id"].strip() for row in rows]
        if pairs:
            captions = {video: [row["sentence"]] for video, row in zip(ids, rows, strict=True)}
        else:
            captions, problems = self._captions
            findings.problems += problems
        protocol = "full split, twenty captions per video" if self.split == "full" else "1k-A, one caption per video"
        return self.build_split(name, protocol, captions, findings, source, file=file, ids=ids)

    @cached_property
    def _captions(self) -> tuple[dict[str, list[str]], list[Problem]]:
        """Captions of every video in the JSON file, in file order, and the problems of the file."""
        findings = Findings()
        source = self.folder / "MSRVTT_data.json"
        data = read_json(source, {"videos": [{"video_id": str}], "sentences": [{"video_id": str, "caption": str}]})
        listed = [video["video_id"] for video in data["videos"]]
        findings.problems += duplicates(source, listed)
        captions: dict[str, list[str]] = {video: [] for video in listed}
        for number, sentence in enumerate(data["sentences"]):
            video = sentence["video_id"]
            if video in captions:
                captions[video].append(sentence["caption"])
            else:
                message = f"caption for {video}, which 'videos' does not list"
                fix = "add the video there or remove it"
                findings.add(source, f"sentences[{number}]", "caption-without-video", message, fix)
        return captions, findings.problems
