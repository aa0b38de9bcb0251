"""Datasets that read texts, videos and matching pairs of one split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from tvr_lightning.data.batch import Media, PairBatch, TextBatch, Tokens, VideoBatch
from tvr_lightning.data.readers import VideoReader
from tvr_lightning.data.records import Split
from tvr_lightning.data.recover_captions import RecoverCaptions
from tvr_lightning.errors import UserError
from tvr_lightning.features import FeatureBatch
from tvr_lightning.media.container import MediaError, VideoError

R = TypeVar("R", bound=FeatureBatch)


class SplitDataset(Dataset[R]):
    """Dataset from which a DataLoader reads whole batches."""

    def __getitems__(self, indices: Sequence[Any]) -> list[R | UserError]:
        """Return the items as one batch, or an error that a user can fix, in a list of one."""
        try:
            items = [self[index] for index in indices]
            return [type(items[0]).cat(items)]
        except UserError as error:
            return [error]


@dataclass(eq=False)
class TextDataset(SplitDataset[TextBatch]):
    """Texts of a split, each with its index."""

    split: Split
    read: VideoReader

    def __len__(self) -> int:
        return len(self.split.texts)

    def __getitem__(self, index: int) -> TextBatch:
        return TextBatch(self.read.text(self.split.texts[index].text), torch.tensor([index]))


@dataclass(eq=False)
class VideoDataset(SplitDataset[VideoBatch]):
    """Unique videos of a split, each with its index.

    With `skip`, an unreadable video becomes a record of zero videos that names it in `skipped`.
    """

    split: Split
    read: VideoReader
    skip: bool = False

    def __len__(self) -> int:
        return len(self.split.videos)

    def __getitem__(self, index: int) -> VideoBatch:
        return self.item(index)

    def item(self, index: int, generator: np.random.Generator | None = None) -> VideoBatch:
        """Return one video, or zero videos if it cannot be read; `generator` is for training."""
        record = self.split.videos[index]
        try:
            video = self.read(record, generator)
        except MediaError as error:
            if not self.skip:
                raise
            return VideoBatch(self.read.empty(), torch.zeros(0, dtype=torch.int64), [], skipped=[str(error)])
        problems = video.problems if isinstance(video, Media) else []
        return VideoBatch(video, torch.tensor([index]), [record.video_id], list(problems))


@dataclass(eq=False)
class PairDataset(SplitDataset[PairBatch]):
    """Matching pairs of a training split, indexed by the (epoch, sample) pairs of `TrainingSampler`.

    A sample is a caption, or with `one_caption` a video with one of its captions, selected randomly in each epoch.
    `seed`, epoch and sample determine caption, random frames and augmentation in any worker. With `skip`, an unreadable
    video is replaced by the next readable one and named in `skipped`. `captions` are additional descriptions, added to
    each pair as `extras["recover_captions"]`: token IDs, or strings without `tokenize`.
    """

    split: Split
    read: VideoReader
    one_caption: bool = False
    seed: int = 0
    skip: bool = False
    captions: RecoverCaptions | None = None
    tokenize: Callable[[list[str]], Tokens] | None = None

    def __post_init__(self) -> None:
        self._texts = TextDataset(self.split, self.read)
        self._videos = VideoDataset(self.split, self.read, self.skip)
        self._captions = self.split.texts_of_videos()

    def __len__(self) -> int:
        return len(self._videos if self.one_caption else self._texts)

    def __getitem__(self, position: tuple[int, int]) -> PairBatch:
        epoch, sample = position
        generator = np.random.default_rng([self.seed, epoch, sample])
        first = sample if self.one_caption else self.split.texts[sample].video
        skipped: list[str] = []
        # Substitutes follow in file order, each with one of its captions, since the sample's does not fit.
        for video in chain(range(first, len(self._videos)), range(first)):
            drawn = self.one_caption or video != first
            text = int(generator.choice(self._captions[video])) if drawn else sample
            item = self._videos.item(video, generator)
            skipped += item.skipped
            if not len(item):
                continue
            item.skipped = skipped
            extras = {}
            if self.captions is not None:
                described = self.captions.descriptions.get(item.video_id[0], [])
                extras["recover_captions"] = [described if self.tokenize is None else self.tokenize(described)]
            return PairBatch(self._texts[text], item, extras)
        raise VideoError(self.split.videos[first].path, f"no video of the split can be read; first: {skipped[0]}")
