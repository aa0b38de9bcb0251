"""ActivityNet Captions: long web videos, each with a paragraph of timed sentences."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, duplicates, malformed, read_json
from tvr_lightning.media.sampling import Span
from tvr_lightning.option_types import Role

FILES: dict[SplitName, tuple[str, str]] = {
    "train": ("train_ids.json", "train.json"),
    "test": ("val_ids.json", "val_1.json"),
}


class ActivityNet(TextVideoDataModule):
    """ActivityNet Captions (Krishna et al., "Dense-captioning events in videos", ICCV 2017), paragraph to val1 video.

    All sentences of a video form one query (Zhang et al., ECCV 2018), and the 4,917 videos of val1 are the test set,
    as in the literature (CLIP4Clip's `dataloader_activitynet_retrieval.py`); 10,009 videos are for training. There is
    no other validation split: papers validate on the test set; `holdout` holds out training videos instead. The ID
    files list a few more videos (10,024 and 4,926), which have no sentences and are omitted. IDs start with `v_`, as
    in the files.

    Args:
        split: "val1" is the only protocol.
        annotated_end: End each video at its annotated duration, rounded up to whole seconds (CLIP4Clip's loader).
            Videos without a `duration`, such as those of the Hub's lists, are read to the end of the file.
        **options: options of all datasets, including `frames` and `words` (`TextVideoDataModule`).
    """

    title = "ActivityNet Captions"
    directory = "activitynet"
    layout = """\
$TVR_DATA/activitynet/
  train.json, val_1.json          {"v_<id>": {"sentences": [...], ...}, ...}
  train_ids.json, val_ids.json    ["v_<id>", ...]
  videos/v_<id>.mp4 ..."""
    suffix = ".mp4"
    has_official_validation = False  # papers use val1 for testing

    def __init__(
        self,
        *,
        split: Literal["val1"] = "val1",
        annotated_end: Annotated[bool, Role.READING, Role.DATASET] = False,
        frames: int = 64,
        words: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(split=split, frames=frames, words=words, **options)
        self.annotated_end = annotated_end

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        return [self.folder / file for file in FILES[name]]

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        ids_file, source = self.required_files(name)
        ids = read_json(ids_file, [str])
        findings.problems += duplicates(ids_file, ids)
        annotations = read_json(source, {str: {"sentences": [str]}})
        for video in sorted(annotations.keys() - ids):
            message = f"{ids_file.name} does not list it"
            findings.add(source, video, "caption-without-video", message, "add the id there or remove the entry")
        for video in sorted(set(ids) - annotations.keys()):
            findings.note(ids_file, video, "video-without-caption", f"{source.name} has no such entry", "left out")
        captions = {video: annotations[video]["sentences"] for video in ids if video in annotations}
        spans: dict[str, Span] = {}
        for video in captions:
            duration = annotations[video].get("duration")
            if self.annotated_end and duration is not None:
                if not isinstance(duration, int | float) or not 0 < duration < math.inf:
                    message = f"{duration!r} is not a length in seconds"
                    raise malformed(source, f"{video}, duration", message, "correct it")
                spans[video] = 0.0, float(math.ceil(duration))
        protocol = "paragraph to video on val1, all sentences of a video as one query"
        return self.build_split(name, protocol, captions, findings, source, spans=spans, paragraph=True)
