"""What the benchmark of pairwise scoring knows of a method: the head to measure, and the released computation."""

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
    """D, W and F of the features."""

    dimension: int
    words: int
    frames: int


@dataclass
class Subject:
    """A method to measure.

    Attributes:
        title: how its released computation differs from ours, for the table.
        build: (form, budget in MiB, sizes) to a head without dropout.
        score: (head, text, video) to (N, M) scores.
        released_block: (head, text, video) to the (N, M) scores of one block, computed as the released code does.
        pair_numbers: (sizes) to the numbers of the largest tensor of the released computation, per pair.
        pairs: texts, and videos, of the comparison.
        dense_budgets: budgets in MiB of our dense form, of which the fastest counts; none without such a form.
    """

    title: str
    build: Callable[[str, int | None, Sizes], nn.Module]
    score: Callable[[nn.Module, TextFeatures, VideoFeatures], Tensor]
    released_block: Callable[[nn.Module, TextFeatures, VideoFeatures], Tensor]
    pair_numbers: Callable[[Sizes], int]
    pairs: int
    dense_budgets: tuple[int, ...] = (8, 32, 128)

    def released(self, head: nn.Module, text: TextFeatures, video: VideoFeatures, texts: int, videos: int) -> Tensor:
        """Score all pairs in blocks of so many texts and videos as the released code does."""
        rows = [text[i : i + texts] for i in range(0, len(text), texts)]
        columns = [video[i : i + videos] for i in range(0, len(video), videos)]
        return torch.cat([torch.cat([self.released_block(head, t, v) for v in columns], 1) for t in rows])


def of_form(head: PairHead, form: str, budget: int | None) -> PairHead:
    """Return the head bound to a form, `factorised` or `dense`, with blocks of `budget` MiB where one is given."""
    head.required_form = DensePairVectors if form == "dense" else PairVectors
    if budget is not None:
        head.memory_gib = 2 * budget / 1024  # of which a block takes half
    return head


def away_from_start(head: nn.Module) -> nn.Module:
    """Return the head in evaluation mode with parameters away from their start."""
    for parameter in head.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return head.eval()
