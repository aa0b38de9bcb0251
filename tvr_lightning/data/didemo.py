"""DiDeMo: Flickr videos with several one-sentence descriptions each, used as one paragraph."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, read_json, read_lines, read_table
from tvr_lightning.option_types import Positive, Role


class DiDeMo(TextVideoDataModule):
    """DiDeMo (Hendricks et al., "Localizing moments in video with natural language", ICCV 2017), paragraph to video.

    The descriptions of a video are joined with a space in file order into one query (Zhang et al., ECCV 2018;
    CLIP4Clip's `dataloader_didemo_retrieval.py`). The lists have 8,392 / 1,065 / 1,004 videos and an official
    validation split. Names include their suffix, which is only "." for some; the JSON file also describes videos
    outside the lists, which are omitted.

    Args:
        split: "lists" for the lists and JSON files; "tmass" for the CSV files of T-MASS (8,362 / 1,062 / 1,004 videos
            with joined paragraphs; only the file names of their absolute paths are used); or "hub" for the lists and
            JSON files that `tvr data import` creates from those of the Hub (8,395 / 1,004 videos, no validation split).
        seconds: length of the segment that is read from the start of a video; null reads the whole file, as GAID does.
            CLIP4Clip reads 31 seconds, since annotators saw at most 30.
        **options: options of all datasets, including `frames` and `words` (`TextVideoDataModule`).
    """

    title = "DiDeMo"
    directory = "didemo"
    layout = """\
$TVR_DATA/didemo/
  {train,val,test}_list.txt             for split lists or hub: one video name per line
  {train,val,test}_data.json            for split lists or hub: [{"video": ..., "description": ...}, ...]
  tmass/didemo_{train,val,test}_label.csv  for split tmass: columns video_path, text
  videos/<name as listed, any container> ..."""

    def __init__(
        self,
        *,
        split: Literal["lists", "tmass", "hub"] = "lists",
        seconds: Annotated[Positive | None, Role.READING, Role.DATASET] = 31.0,
        frames: int = 64,
        words: int = 64,
        **options: Any,
    ) -> None:
        self.span = None if seconds is None else (0.0, seconds)
        self.has_official_validation = split != "hub"
        super().__init__(split=split, frames=frames, words=words, **options)

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        if self.split == "tmass":
            return [self.folder / "tmass" / f"didemo_{name}_label.csv"]
        return [self.folder / f"{name}_list.txt", self.folder / f"{name}_data.json"]

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        source, file = self.required_files(name)[0], self.required_files(name)[-1]
        descriptions: dict[str, list[str]] = {}
        if self.split == "tmass":
            rows = read_table(source, ["video_path", "text"])
            ids = [PurePosixPath(row["video_path"].strip()).name for row in rows]
            descriptions = {video: [row["text"]] for video, row in zip(ids, rows, strict=True)}
        else:
            ids = read_lines(source)
            for moment in read_json(file, [{"video": str, "description": str}]):
                descriptions.setdefault(moment["video"], []).append(moment["description"])
        spans = {} if self.span is None else dict.fromkeys(ids, self.span)
        protocol = "paragraph to video, all descriptions of a video as one query"
        return self.build_split(
            name, protocol, descriptions, findings, source, file=file, ids=ids, spans=spans, paragraph=True
        )
