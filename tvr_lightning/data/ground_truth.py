"""Ground truth of an evaluation split: the matching video of each text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tvr_lightning.data.records import Split
from tvr_lightning.errors import UserError


@dataclass
class GroundTruth:
    """Text-video pairs of an evaluation split, which only the evaluator sees.

    Attributes:
        video_of_text: (N,) int64, index of the video that each text of the split describes.
        videos: Number of videos M of the split; videos without a text are distractors.
        dataset, split, protocol: Names for results, such as `MSR-VTT`, `test` and `1k-A, one caption per video`.
        warnings: Warnings of every result on the dataset.
    """

    video_of_text: Tensor
    videos: int
    dataset: str
    split: str
    protocol: str
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        where, pairs = f"{self.dataset} {self.split}", self.video_of_text
        if pairs.ndim != 1 or pairs.dtype != torch.int64:
            found = f"{tuple(pairs.shape)} {pairs.dtype}"
            raise UserError(f"{where}: video_of_text must be one int64 per text, got {found}")
        if not len(pairs):
            raise UserError(f"{where}: there are no texts to rank")
        outside = ((pairs < 0) | (pairs >= self.videos)).nonzero().flatten().tolist()
        if outside:
            first = f"text {outside[0]} describes video {int(pairs[outside[0]])}"
            raise UserError(f"{where}: {first}, but the split has {self.videos} videos")

    @classmethod
    def of(cls, dataset: str, split: Split, warnings: Sequence[str] = ()) -> GroundTruth:
        """Return the pairs of a split, with the title and warnings of the dataset."""
        pairs = torch.tensor([text.video for text in split.texts], dtype=torch.int64)
        return cls(pairs, len(split.videos), dataset, split.name, split.protocol, list(warnings))

    @property
    def texts(self) -> int:
        """Number of texts N."""
        return len(self.video_of_text)
