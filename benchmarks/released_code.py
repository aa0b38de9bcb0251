"""Description of a method for the benchmark of pairwise scoring: its head, and the released computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods.pair_head import PairHead
from tvr_lightning.pairwise import DensePairVectors, PairVectors


@dataclass
class Sizes:
    """Sizes D, W, and F of the features."""

    dimension: int
    words: int
    frames: int


@dataclass
class Subject:
    """A method to measure.

    Attributes:
        title: Name of the released computation in the table.
        build: Function from form, budget in MiB, and sizes to a head without dropout.
        score: Function from head, text, and video to scores (N, M).
        released_block: Function from head, text, and video to the scores (N, M) of one block of the released code.
        pair_numbers: Function from sizes to the number of elements per pair in the largest tensor of the released code.
        pairs: Default number of texts and of videos to compare.
        dense_budgets: Budgets in MiB of our dense form, of which the fastest counts. Empty if there is no such form.
    """

    title: str
    build: Callable[[str, int | None, Sizes], nn.Module]
    score: Callable[[nn.Module, TextFeatures, VideoFeatures], Tensor]
    released_block: Callable[[nn.Module, TextFeatures, VideoFeatures], Tensor]
    pair_numbers: Callable[[Sizes], int]
    pairs: int
    dense_budgets: tuple[int, ...] = (8, 32, 128)

    def released(self, head: nn.Module, text: TextFeatures, video: VideoFeatures, texts: int, videos: int) -> Tensor:
        """Score all pairs as the released code does, in blocks of the given numbers of texts and videos."""
        rows = [text[i : i + texts] for i in range(0, len(text), texts)]
        columns = [video[i : i + videos] for i in range(0, len(video), videos)]
        return torch.cat([torch.cat([self.released_block(head, t, v) for v in columns], 1) for t in rows])


def of_form(head: PairHead, form: str, budget: int | None) -> PairHead:
    """Return the head in a form, `factorized` or `dense`, with blocks of `budget` MiB if given."""
    head.required_form = DensePairVectors if form == "dense" else PairVectors
    if budget is not None:
        head.memory_gib = 2 * budget / 1024  # a block takes half of it
    return head


def away_from_start(head: nn.Module) -> nn.Module:
    """Return the head in evaluation mode, with its parameters moved away from their initial values."""
    for parameter in head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return head.eval()
