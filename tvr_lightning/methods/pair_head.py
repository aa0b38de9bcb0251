"""What heads over all pairs of texts and videos share: the form of their pair vectors, their memory, their blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from tvr_lightning.features import Record, Scores, TextFeatures, VideoFeatures
from tvr_lightning.pairwise import DensePairVectors, DropoutPer, PairVectors, Pairwise, score_in_blocks

H = TypeVar("H", bound="PairHead")
GIB = 2**30
MIB = 2**20
CACHES = {"video": 32 * MIB, "text": 32 * MIB, "both": 16 * MIB}
"""What a block may take on a CPU: larger ones leave its caches. By the sides of which it has few."""

TRAINING_CACHE = 64 * MIB
"""The same where a gradient is asked for, which a block keeps more for."""


def check_dropout_per(per: DropoutPer, dropout: float) -> None:
    """Refuse to draw dropout for every video where nothing is drawn.

    Raises:
        ValueError: names both options.
    """
    if per == "video" and not dropout:
        raise ValueError("dropout_per is video, but dropout is 0, so dropout_per has no effect. Leave it at pair.")


class PairHead(nn.Module, ABC):
    """Scores N texts against M videos, block by block.

    A head says in `prepare` what belongs to a text or to a video alone, which is computed once, and in `score` how any
    texts meet any videos. The vectors that it gives every pair are of the cheaper `form` that training allows.

    Args:
        dimension: D.
        basis: K, vectors of one side that the vectors of a pair are sums of; 0 for a head without such vectors.
        slots: Q, vectors per pair.
        dropout: probability on the elements of pair vectors in training.
        dropout_per: what it is drawn for anew, every pair or every video, which leaves vectors in their form.
        behind_dropout: vectors of D that a pair and slot then keeps; none where texts alone meet what dropout leaves.
        extra: numbers that a pair takes while it is scored besides its vectors.
        side: whose vectors the basis holds: few of its items are scored at a time, against all of the other side; both
            where there is none.

    Attributes:
        memory_gib: budget in GiB for what scoring pairs holds at a time; see `within`.
        required_form: form to use in place of the cheaper one, to compare both.
    """

    def __init__(
        self,
        dimension: int,
        *,
        basis: int = 0,
        slots: int = 1,
        dropout: float = 0.0,
        dropout_per: DropoutPer = "pair",
        behind_dropout: int = 0,
        extra: int = 0,
        side: Literal["video", "text", "both"] = "video",
    ) -> None:
        super().__init__()
        self.dimension, self.basis, self.slots, self.extra = dimension, basis, slots, extra
        self.pair_dropout = dropout if dropout_per == "pair" else 0.0
        self.behind_dropout = behind_dropout
        self.side: Literal["video", "text", "both"] = side
        self.memory_gib = 2.0
        self.required_form: type[Pairwise] | None = None

    def within(self: H, memory_gib: float) -> H:
        """Return the head itself, which now scores within a budget: of a method, `evaluation.memory_gib`.

        Args:
            memory_gib: GiB for what scoring pairs holds at a time.
        """
        self.memory_gib = memory_gib
        return self

    @property
    def form(self) -> type[Pairwise]:
        """The form of pair vectors: factorised, but dense where D is no more than K.

        Behind dropout that is drawn for every pair they are made element by element in any case.
        """
        if self.required_form is not None:
            return self.required_form
        return DensePairVectors if self.basis >= self.dimension else PairVectors

    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[Any, Any]:
        """Return what `score` takes of N texts and of M videos, records both; the features themselves by default."""
        return text, video

    @abstractmethod
    def score(self, text: Any, video: Any, *given: Any) -> Scores:
        """Score any n prepared texts against any m prepared videos: `similarity` (n, m), and parts (n, m, ...)."""

    def pair_numbers(self, text: Record, video: Record) -> int:
        """Return how many numbers a pair takes while it is scored: its vectors several times over, and what is extra.

        Args:
            text: prepared texts.
            video: prepared videos.
        """
        if not self.basis:
            return self.extra
        if self.form is DensePairVectors:
            return 8 * self.slots * self.dimension + self.extra
        numbers = 8 * self.slots * (self.basis + 4) + self.extra
        if self.training and self.pair_dropout > 0:  # a byte per element says which dropout leaves
            numbers += self.slots * self.dimension * (1 + 4 * self.behind_dropout) // 4
        return numbers

    def forward(self, text: TextFeatures, video: VideoFeatures, *given: Any) -> Scores:
        """Score N texts against M videos in float32 at least, whatever autocast says.

        Args:
            text: of N texts.
            video: of M videos.
            given: what `score` takes besides.

        Returns:
            `similarity` (N, M) and the head's parts (N, M, ...).
        """
        text, video = text.float(), video.float()
        with torch.autocast(text.sentence.device.type, enabled=False):
            return self.in_blocks(lambda some, few: self.score(some, few, *given), *self.prepare(text, video))

    def in_blocks(self, score: Callable[[Any, Any], Scores], text: Record, video: Record, extra: int = 0) -> Scores:
        """Score N prepared texts against M prepared videos with `score`, block by block.

        Args:
            score: any n of the texts against any m of the videos.
            text: prepared texts.
            video: prepared videos.
            extra: numbers that a pair takes besides those that the head counts.
        """
        tensor = next(tensor for tensor in text.tensors() if tensor.is_floating_point())
        order = self.order(text)
        scores = score_in_blocks(
            score,
            text if order is None else text[order],
            video,
            pair_bytes=tensor.element_size() * (self.pair_numbers(text, video) + extra),
            budget=self.block_bytes(tensor.device),
            few=self.side,
            kept=self.kept_bytes,
        )
        if order is None:
            return scores
        back = order.argsort()
        return Scores(scores.similarity[back], {name: part[back] for name, part in scores.parts.items()})

    def order(self, text: Record) -> Tensor | None:
        """Return the order (N,) int64 in which prepared texts are scored; None leaves them in theirs."""
        return None

    @property
    def kept_bytes(self) -> int:
        """What all blocks may hold together: half of the budget, the other half is the evaluator's."""
        return max(int(self.memory_gib * GIB / 2), 1)

    def block_bytes(self, device: torch.device) -> int:
        """Return the memory of one block: all that may be held, on a CPU no more than its caches hold."""
        # What dropout leaves goes through the caches in pieces; where all of it is kept, joining blocks would copy it.
        joined = self.training and self.pair_dropout > 0 and self.behind_dropout > 0
        if device.type != "cpu" or joined:
            return self.kept_bytes
        return min(self.kept_bytes, TRAINING_CACHE if torch.is_grad_enabled() else CACHES[self.side])

    def of_texts(self, vectors: Tensor, videos: int) -> Pairwise:
        """Return vectors (N, D) or (N, Q, D) of texts, for each of `videos` videos."""
        return self.form.from_texts(vectors if vectors.ndim == 3 else vectors.unsqueeze(1), videos)

    def of_videos(self, vectors: Tensor, texts: int) -> Pairwise:
        """Return vectors (M, D) or (M, Q, D) of videos, for each of `texts` texts."""
        return self.form.from_videos(vectors if vectors.ndim == 3 else vectors.unsqueeze(1), texts)
