"""Datasets that read texts, videos and matching pairs of one split."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from tvr_lightning.data.batch import Media, PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.data.readers import VideoReader
from tvr_lightning.data.records import Split
from tvr_lightning.data.recover_captions import RecoverCaptions
from tvr_lightning.media.container import MediaError, VideoError


@dataclass(eq=False)
class TextDataset(Dataset[TextBatch]):
    """Texts of a split, each with its index."""

    split: Split
    read: VideoReader

    def __len__(self) -> int:
        return len(self.split.texts)

    def __getitem__(self, index: int) -> TextBatch:
        return TextBatch(self.read.text(self.split.texts[index].text), torch.tensor([index]))


@dataclass(eq=False)
class VideoDataset(Dataset[VideoBatch]):
    """Unique videos of a split, each with its index.

    With `skip`, an unreadable video becomes a record of zero videos that names it in `skipped`.
    """

    split: Split
    read: VideoReader
    skip: bool = False

    def __len__(self) -> int:
        return len(self.split.videos)

    def __getitem__(self, index: int) -> VideoBatch:
        try:
            return self.item(index)
        except MediaError as error:
            if not self.skip:
                raise
            return VideoBatch(self.read.empty(), torch.zeros(0, dtype=torch.int64), [], skipped=[str(error)])

    def item(self, index: int, generator: np.random.Generator | None = None) -> VideoBatch:
        """Return one video, or raise an error if it cannot be read; `generator` is for training."""
        record = self.split.videos[index]
        video = self.read(record, generator)
        problems = video.problems if isinstance(video, Media) else []
        return VideoBatch(video, torch.tensor([index]), [record.video_id], list(problems))


@dataclass(eq=False)
class PairDataset(Dataset[PairBatch]):
    """Matching pairs of a training split, indexed by the (epoch, sample) pairs of `TrainingSampler`.

    Attributes:
        split: Texts and videos; every video has a text.
        read: Reader of a video.
        one_caption: Whether a sample is a video with one of its captions, selected randomly in each epoch. Otherwise
            every caption is a sample.
        seed: Seed that, with epoch and sample, determines caption, random frames and augmentation in any worker.
        skip: Whether an unreadable video is replaced by the next readable one and named in `skipped`.
        captions: Additional descriptions, added to each pair as `extras["recover_captions"]`.
        tokenise: The encoder's `caption_tokens` for these descriptions; None leaves them as a list of strings.
    """

    split: Split
    read: VideoReader
    one_caption: bool = False
    seed: int = 0
    skip: bool = False
    captions: RecoverCaptions | None = None
    tokenise: Callable[[list[str]], Tokens] | None = None

    def __post_init__(self) -> None:
        self._texts, self._videos = TextDataset(self.split, self.read), VideoDataset(self.split, self.read)
        self._captions = self.split.texts_of_videos()

    def __len__(self) -> int:
        return len(self._videos if self.one_caption else self._texts)

    def __getitem__(self, position: tuple[int, int]) -> PairBatch:
        epoch, sample = position
        generator = np.random.default_rng([self.seed, epoch, sample])
        if self.one_caption:
            video, text = sample, int(generator.choice(self._captions[sample]))
        else:
            video, text = self.split.texts[sample].video, sample
        skipped: list[str] = []
        for step in range(len(self._videos)):
            # Substitutes follow in file order, each with one of its captions, since the sample's does not fit.
            candidate = (video + step) % len(self._videos)
            if step:
                text = int(generator.choice(self._captions[candidate]))
            try:
                item = self._videos.item(candidate, generator)
            except MediaError as error:
                if not self.skip:
                    raise
                skipped.append(str(error))
                continue
            item.skipped = skipped + item.skipped
            extras = {}
            if self.captions is not None:
                described = self.captions.of(item.video_id[0])
                extras["recover_captions"] = [described if self.tokenise is None else self.tokenise(described)]
            return PairBatch(self._texts[text], item, extras)
        raise VideoError(self.split.videos[video].path, f"no video of the split can be read; first: {skipped[0]}")
