"""MSRVTT-QA: questions with one-word answers about the videos of MSR-VTT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.records import (
    Findings,
    Split,
    SplitName,
    TextRecord,
    VideoRecord,
    expect,
    field_of,
    malformed,
    read_json,
    tidy,
)
from tvr_lightning.data.video_files import VideoFiles


@dataclass(frozen=True, slots=True)
class QuestionRecord(TextRecord):
    """One question of a split.

    Attributes:
        answer: the right answer.
        category: MSR-VTT's category of the video, or None where the file does not say.
    """

    answer: str
    category: int | None = None

    @property
    def kind(self) -> str:
        """The question word, by which results are reported: what, who, how, when, where, ..."""
        return self.text.split()[0].lower()


class MSRVTTQA(TextVideoDataModule):
    """MSRVTT-QA (Xu et al., "Video question answering via gradually refined attention", ACM MM 2017).

    Questions were made from the captions of MSR-VTT's official split by rule; answers are single words. The texts of
    a split are its questions (`QuestionRecord`), each about one video. Video ids in the files are numbers, 7010 for
    video7010; names are read as well.

    Args:
        split: "official", the only one.
        **options: shared by all datasets, `frames` and `words` among them; see `TextVideoDataModule`.
            `captions_per_epoch: all` makes every question a sample; `captions` is only for retrieval.

    Raises:
        ValueError: as `TextVideoDataModule`, or `captions` names a file.
    """

    title = "MSRVTT-QA"
    directory = "msrvtt"
    layout = """\
$TVR_DATA/msrvtt/
  train_qa.json, val_qa.json, test_qa.json  [{"id", "question", "answer", "video_id", "category_id"}, ...]
  videos/video0.mp4 ..."""

    def __init__(
        self,
        *,
        split: Literal["official"] = "official",
        frames: int = 12,
        words: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(split=split, frames=frames, words=words, **options)
        if self.extra_captions is not None:
            raise ValueError(
                f"extra_captions {self.extra_captions!r}: descriptions are only for retrieval, not for questions. "
                "Unset extra_captions."
            )

    @property
    def has_official_validation(self) -> bool:
        """True: its validation split is val_qa.json."""
        return True

    @property
    def one_caption_evaluation(self) -> bool:
        """False: a video has many questions."""
        return False

    def required_files(self, name: SplitName) -> list[Path]:
        """The split's json."""
        return [self.folder / f"{name}_qa.json"]

    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split; its videos are in the order in which the file first asks about them."""
        source = self.folder / f"{name}_qa.json"
        entries: list[Any] = expect(source, "top level", read_json(source), list, "write a list of questions")
        folder = VideoFiles(self.video_root, ".mp4")
        videos: dict[str, int] = {}
        questions: list[TextRecord] = []
        for number, entry in enumerate(entries):
            where = f"[{number}]"
            expect(source, where, entry, dict, 'write {"question": ..., "answer": ..., "video_id": ...}')
            question = tidy(field_of(source, where, entry, "question", str))
            answer = tidy(field_of(source, where, entry, "answer", str))
            video_id = _video_id(source, where, entry)
            category = entry.get("category_id")
            for key, value in (("question", question), ("answer", answer)):
                if not value:
                    fix = f"write the {key} or remove the entry"
                    findings.add(source, f"{where}, {key}", "empty-caption", f"the {key} is empty", fix)
            if question and answer:
                video = videos.setdefault(video_id, len(videos))
                questions.append(QuestionRecord(question, video, answer, category))
        if not videos:
            findings.add(source, "whole file", "malformed", "contains no questions", "download the file again")
        records = [VideoRecord(video_id, folder.find(video_id)) for video_id in videos]
        return Split(name, "open-ended, one answer per question", records, questions)

    def evaluation_dataloaders(self, name: SplitName) -> list[DataLoader[TextBatch] | DataLoader[VideoBatch]]:
        """Return the loaders [unique videos, questions] of a split; answering needs the video first."""
        return super().evaluation_dataloaders(name)[::-1]

    def questions(self, name: SplitName) -> list[QuestionRecord]:
        """Return the N questions of a split in the order of their index in batches.

        Raises:
            MissingData: files are missing and `on_corrupt` is "error".
            AnnotationError: as `read_split`.
        """
        return [text for text in self.load_split(name).texts if isinstance(text, QuestionRecord)]


def _video_id(source: Path, where: str, entry: dict[str, Any]) -> str:
    """Return the video's name: `video7010` for 7010, "7010" and "video7010"."""
    found = entry.get("video_id")
    if isinstance(found, int) and not isinstance(found, bool):
        return f"video{found}"
    if isinstance(found, str) and found.strip():
        name = found.strip()
        return f"video{name}" if name.isdigit() else name
    raise malformed(
        source, where, f"the key 'video_id' is {found!r}", "write the video's number, such as 7010, or its name"
    )
