"""Ground truth of an evaluation split: the matching video of each text."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tvr_lightning.data.records import Split
from tvr_lightning.errors import UserError


@dataclass
class GroundTruth:
    """Text-video pairs of an evaluation split, which only the evaluator sees.

    Own loaders pass it to `Trainer.validate` and `Trainer.test` as the attribute `ground_truth` of a dataset.

    `video_of_text` (N,) int64 is the index of the video that each text describes. `videos` is their number M; those
    without a text are distractors. `warnings` are those of every result, and `where` names the split in messages.
    `items` are the captions and files themselves, for a reranker.
    """

    video_of_text: Tensor
    videos: int
    dataset: str
    split: str
    protocol: str
    warnings: list[str] = field(default_factory=list)
    where: str = ""
    items: Split | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.where = self.where or f"the {self.split} split of {self.dataset}"
        if self.video_of_text.ndim != 1 or self.video_of_text.dtype != torch.int64:
            found = f"{tuple(self.video_of_text.shape)} {self.video_of_text.dtype}"
            raise UserError(f"{self.where}: video_of_text must be one int64 per text, got {found}")
        if not len(self.video_of_text):
            raise UserError(f"{self.where}: there are no texts to rank")
        outside = ((self.video_of_text < 0) | (self.video_of_text >= self.videos)).nonzero()
        if len(outside):
            text = int(outside[0])
            video = int(self.video_of_text[text])
            raise UserError(f"{self.where}: text {text} describes video {video}, but there are {self.videos} videos")

    @property
    def texts(self) -> int:
        """Number of texts N."""
        return len(self.video_of_text)

    def check_index(self, index: Tensor, kind: Literal["texts", "videos"]) -> None:
        """Refuse indices (B,) of texts or videos that this ground truth does not cover."""
        count = getattr(self, kind)
        outside = [each for each in index.tolist() if not 0 <= each < count]
        if outside:
            raise UserError(
                f"{self.where}: a loader returned index {outside[0]}, but the ground truth has {count} {kind}. Number "
                "them from 0, as in the ground truth."
            )
