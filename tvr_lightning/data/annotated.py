"""Annotation files of a dataset, and the splits that they define."""

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
import torch

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.records import (
    SYNTHETIC,
    SYNTHETIC_FILE,
    AnnotationError,
    Findings,
    Problem,
    Split,
    SplitName,
    TextRecord,
    VideoRecord,
    duplicates,
    hold_out,
    shared_videos,
    tidy,
)
from tvr_lightning.data.video_files import VideoFiles
from tvr_lightning.errors import MissingAssetError, abbreviated
from tvr_lightning.media.sampling import Span

STAGES: dict[str | None, tuple[SplitName, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("test",),
    None: ("train", "val", "test"),
}


class AnnotatedDataset(ABC):
    """Files of a dataset and the splits that they define; nothing is decoded.

    A dataset defines its name and files, and how its splits are read (`parse_split`). `suffix` is what its files omit
    from the names of videos. The other attributes are options of `TextVideoDataModule`.
    """

    title: ClassVar[str]
    directory: ClassVar[str]
    layout: ClassVar[str]
    suffix: ClassVar[str] = ""
    has_official_validation: bool = False
    """Whether the chosen split has an official validation split that differs from the test split."""
    one_caption_evaluation: bool = True
    """Whether the dataset's protocol evaluates one text per video."""
    validates_on_test: bool = False
    """Whether "val" is the test split although the dataset has an official validation split."""
    training_set: str | None = None
    """Name of the chosen training videos if several sets of them share one test set."""

    root: str | None
    split: str
    holdout: int
    max_train_videos: int | None
    seed: int
    _read: dict[SplitName, Split]

    # Properties of the dataset

    @property
    def official_splits(self) -> tuple[SplitName, ...]:
        """Splits in the annotation files."""
        return STAGES[None] if self.has_official_validation else ("train", "test")

    @abstractmethod
    def required_files(self, name: SplitName) -> list[Path]:
        """Annotation files that `parse_split(name)` reads."""

    @property
    def video_root(self) -> Path:
        """Folder of the videos, which are directly in it or in subfolders."""
        return self.folder / "videos"

    @abstractmethod
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split from the annotation files and add all their problems to `findings`.

        Called for "val" only if `has_official_validation`. Raises AnnotationError if a file cannot be parsed further.
        """

    @cached_property
    def video_files(self) -> VideoFiles:
        """Files in `video_root` by the names in the annotation files."""
        return VideoFiles(self.video_root, self.suffix)

    def find_video(self, video_id: str) -> Path:
        """Return the path of a video, or its expected path if there is no such file."""
        return self.video_files.find(video_id)

    def build_split(
        self,
        name: SplitName,
        protocol: str,
        captions: Mapping[str, Sequence[str]],
        findings: Findings,
        source: Path,
        *,
        file: Path | None = None,
        ids: Iterable[str] | None = None,
        spans: Mapping[str, Span] | None = None,
        paragraph: bool = False,
    ) -> Split:
        """Return the split with these videos and their captions, and report repeated IDs, missing and empty captions.

        `captions` are by video ID. `source` lists the videos, and `file` has the captions if it is another file. `ids`
        are the IDs as listed, by default those of `captions`; `spans` are the seconds of videos that are parts of their
        files. With `paragraph`, the captions of a video are joined into one text.
        """
        file = file or source
        spans = spans or {}
        listed = list(captions if ids is None else ids)
        findings.problems += duplicates(source, listed)
        videos: list[VideoRecord] = []
        texts: list[TextRecord] = []
        for index, video in enumerate(dict.fromkeys(listed)):
            videos.append(VideoRecord(video, self.find_video(video), spans.get(video)))
            found = [tidy(text) for text in captions.get(video, [])]
            for number, text in enumerate(found):
                if not text:
                    fix = "write a caption or remove the entry"
                    findings.add(file, f"{video}, caption {number}", "empty-caption", "the caption is empty", fix)
            if not found:
                fix = f"add its captions there, or remove it from {source.name}"
                findings.add(file, video, "video-without-caption", "the video has no captions", fix)
            texts += [TextRecord(text, index) for text in ([" ".join(found)] if paragraph else found) if text]
        if not videos:
            findings.add(source, "whole file", "malformed", "lists no videos", "download the file again")
        return Split(name, protocol, videos, texts)

    # Location of the data

    @property
    def folder(self) -> Path:
        """Folder of the dataset in `root` or TVR_DATA, one of which must be set."""
        root = self.root or os.environ.get("TVR_DATA")
        if not root:
            unset = "neither data.init_args.root nor the environment variable TVR_DATA is set"
            raise self.incomplete([f"the parent folder: {unset}"])
        return Path(root).expanduser() / self.directory

    @property
    def warnings(self) -> list[str]:
        """Warnings of every result on this dataset: `SYNTHETIC` if `tvr data synth` wrote its folder."""
        return [SYNTHETIC] if (self.folder / SYNTHETIC_FILE).is_file() else []

    @property
    def full_title(self) -> str:
        """Title of the dataset, with the prefix "synthetic" for a synthetic dataset."""
        return f"synthetic {self.title}" if self.warnings else self.title

    def incomplete(self, absent: list[str]) -> MissingAssetError:
        """Return the error for missing files, which are listed one sentence each, with the expected layout."""
        lines = [f"The data in {self.directory} is incomplete:", *(f"  - {line}" for line in absent)]
        return MissingAssetError("\n".join([*lines, "Expected layout:", self.layout]))

    # Splits

    @property
    def validation(self) -> Literal["official", "holdout", "test"]:
        """Source of `val`: the official split, held-out training videos, or the test split as in the papers."""
        if self.has_official_validation and not self.validates_on_test:
            return "official"
        return "holdout" if self.holdout else "test"

    def source_of(self, name: SplitName) -> SplitName:
        """Return the split of the annotation files from which `name` is built."""
        sources: dict[str, SplitName] = {"official": "val", "holdout": "train", "test": "test"}
        return sources[self.validation] if name == "val" else name

    def examine_split(self, name: SplitName) -> tuple[Split | None, Findings]:
        """Read a split from the annotation files, and return it (None if it cannot be read) with all findings."""
        findings = Findings()
        try:
            return self.parse_split(name, findings), findings
        except AnnotationError as error:
            findings.problems += error.problems
            return None, findings

    def read_split(self, name: SplitName) -> Split:
        """Return a split as defined by the annotation files and the options `holdout` and `max_train_videos`.

        `validation` defines "val"; if it is "test", the returned split is named test. An AnnotationError lists all
        contradictions in the files.
        """
        source = self.source_of(name)
        name = "test" if source == "test" else name
        if name not in self._read:
            split, findings = self.examine_split(source)
            if findings.problems or split is None:
                raise AnnotationError(findings.problems)
            if source == "train" and self.holdout:
                split, self._read["val"] = hold_out(split, self.holdout, self.seed, self.one_caption_evaluation)
            count = len(split.videos)
            most = self.max_train_videos
            if source == "train" and most is not None and most < count:
                drawn = np.random.default_rng([self.seed, count, most]).permutation(count)[:most]
                split = split.take_videos(sorted(drawn.tolist()))
            self._read[source] = split
        return self._read[name]

    def check_disjoint(self) -> None:
        """Raise AnnotationError if two splits share a video; splits that cannot be read are ignored."""
        splits: dict[SplitName, Split] = {}
        for name in STAGES[None]:
            with suppress(AnnotationError, FileNotFoundError):
                split = self.read_split(name)
                splits[split.name] = split  # "val" may be the test split
        for one, other in combinations(splits.values(), 2):
            if ids := [video.video_id for video in shared_videos(one, other)]:
                count = f"{len(ids)} video{'s are' if len(ids) > 1 else ' is'} in both ({abbreviated(ids)})"
                fix = "remove them from one of the two splits"
                names = f"{one.name} and {other.name}"
                raise AnnotationError([Problem(str(self.folder), names, "split-overlap", count, fix)])

    def all_videos(self) -> Self:
        """Return this dataset with all training videos, including those that a recipe holds out or does not sample."""
        whole = copy.copy(self)
        whole.holdout = 0
        whole.max_train_videos = None
        whole._read = {}
        return whole

    def ground_truth(self, name: SplitName) -> GroundTruth:
        """Return the matching video of every text of an evaluation split, with the names used in results."""
        split = self.read_split(name)
        pairs = torch.tensor([text.video for text in split.texts], dtype=torch.int64)
        videos = len(split.videos)
        return GroundTruth(pairs, videos, self.full_title, split.name, split.protocol, self.warnings, items=split)
