"""LSMDC: clips of movies, each with the sentence that describes it to the blind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from tvr_lightning.data.audio_alignment import AudioAlignment
from tvr_lightning.data.augment import Augmentation
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.folder import VideoFolder, inside
from tvr_lightning.data.records import (
    Findings,
    Split,
    SplitBuilder,
    SplitName,
    VideoRecord,
    read_text,
    tidy,
)
from tvr_lightning.data.sampling import FrameSampling

FILES: dict[SplitName, str] = {
    "train": "LSMDC16_annos_training.csv",
    "val": "LSMDC16_annos_val.csv",
    "test": "LSMDC16_challenge_1000_publictect.csv",
}
CLOCK = r"\d{2}\.\d{2}\.\d{2}\.\d{3}"
CLIP = re.compile(rf"(?P<movie>.+)_{CLOCK}-{CLOCK}")


class LSMDC(TextVideoDataModule):
    """LSMDC 2016 (Rohrbach et al., "Movie description", IJCV 2017) with the challenge's 1,000 public test clips.

    101,079 sentences train, 7,408 validate, 1,000 test, one sentence per test clip. Files are tab separated, six
    columns without a header: clip id, four times, sentence. An id can come again with another sentence; both count
    (CLIP4Clip's `dataloader_lsmdc_retrieval.py`). Ids contain dots and begin with the movie's name, which is also the
    name of its folder of clips.

    Args:
        split: "lsmdc16" is the only one.
        **The other arguments**: see `TextVideoDataModule`.
    """

    title = "LSMDC"
    directory = "lsmdc"
    layout = """\
$TVR_DATA/lsmdc/
  LSMDC16_annos_training.csv, LSMDC16_annos_val.csv    id, four times, sentence; tab separated, no header
  LSMDC16_challenge_1000_publictect.csv                the same, for the test
  videos/<movie>/<id>.avi ..."""

    def __init__(
        self,
        root: str | None = None,
        split: Literal["lsmdc16"] = "lsmdc16",
        frames: int = 12,
        words: int = 32,
        image_size: int = 224,
        batch_size: int = 128,
        eval_batch_size: int = 32,
        num_workers: int = 2,
        sampling: FrameSampling = "one-fps-uniform",
        train_sampling: FrameSampling | None = None,
        augmentation: Augmentation = "none",
        captions_per_epoch: Literal["all", "one"] = "all",
        on_corrupt: Literal["error", "skip"] = "error",
        holdout: int = 0,
        max_train_videos: int | None = None,
        seed: int = 0,
        features: str | None = None,
        audio: Literal["none", "whisper", "wav2vec2"] = "none",
        audio_align: AudioAlignment = "duration",
        audio_seconds: float = 60.0,
        captions: str | None = None,
    ) -> None:
        super().__init__(
            root=root,
            split=split,
            frames=frames,
            words=words,
            image_size=image_size,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            sampling=sampling,
            train_sampling=train_sampling,
            augmentation=augmentation,
            captions_per_epoch=captions_per_epoch,
            on_corrupt=on_corrupt,
            holdout=holdout,
            max_train_videos=max_train_videos,
            seed=seed,
            features=features,
            audio=audio,
            audio_align=audio_align,
            audio_seconds=audio_seconds,
            captions=captions,
        )

    @property
    def has_official_validation(self) -> bool:
        """True: LSMDC16_annos_val.csv."""
        return True

    def required_files(self, name: SplitName) -> list[Path]:
        """One tab-separated file."""
        return [self.folder / FILES[name]]

    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split: every clip once, with all its sentences."""
        source = self.folder / FILES[name]
        sentences: dict[str, list[str]] = {}
        movies: dict[str, str] = {}
        for number, line in enumerate(read_text(source).split("\n"), start=1):
            if not line.strip():
                continue
            columns = line.split("\t")
            clip = CLIP.fullmatch(columns[0].strip())
            if len(columns) != 6 or clip is None:
                message = f"{len(columns)} columns" if len(columns) != 6 else f"no clip id: {columns[0]!r}"
                fix = "write six columns separated by tabs, the first <movie>_HH.MM.SS.mmm-HH.MM.SS.mmm"
                findings.add(source, f"line {number}", "malformed", message, fix)
                continue
            said = sentences.setdefault(clip[0], [])
            if name != "train" and tidy(columns[5]) in map(tidy, said):
                message = f"{clip[0]} comes again with the same sentence"
                findings.add(source, f"line {number}", "duplicate-id", message, "remove the line")
            else:
                said.append(columns[5])
            movies[clip[0]] = clip["movie"]
        builder = SplitBuilder(source, findings)
        folders = {movie: VideoFolder(inside(self.video_root, movie), ".avi") for movie in set(movies.values())}
        for clip_id, said in sentences.items():
            builder.add(VideoRecord(clip_id, folders[movies[clip_id]].find(clip_id)), said, source)
        return builder.build(name, "one sentence per clip, 1,000 public test clips")
