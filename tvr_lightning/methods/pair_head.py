"""Base class of heads that score all pairs: form of the pair vectors, memory, and blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from tvr_lightning.evaluation.config import MIB, memory_budget
from tvr_lightning.features import FeatureBatch, Scores, TextFeatures, VideoFeatures
from tvr_lightning.pairwise import DensePairVectors, PairVectors, Pairwise, score_in_blocks
from tvr_lightning.pairwise.tiles import loops_are_fast

CACHES = {"video": 32 * MIB, "text": 32 * MIB, "both": 16 * MIB}
"""Maximum size of a block on a CPU, so that it fits the caches, by the side that is scored a few items at a time."""

TRAINING_CACHE = 64 * MIB
"""Maximum size of a block if gradients are computed, which keeps more data per block."""


class PairHead(nn.Module, ABC):
    """Head that scores N texts against M videos block by block.

    `prepare` computes features of single texts and videos once, and `score` scores any texts against any videos. Pair
    vectors are stored in the cheaper `form` that training allows. `required_form` overrides it, to compare both.

    Args:
        dimension: Dimension D of the vectors.
        basis: Number K of vectors of one side that the vectors of a pair are sums of; 0 for a head without them.
        slots: Number Q of vectors per pair.
        dropout: Dropout rate of the elements of pair vectors in training.
        behind_dropout: Number of D-dimensional vectors per pair and slot that are kept after dropout; 0 if texts alone
            are multiplied with the result.
        extra: Additional memory per pair during scoring, in elements.
        side: Side of the basis vectors, of which a few items at a time are scored against all of the other side;
            `both` without a basis.
    """

    def __init__(
        self,
        dimension: int,
        *,
        basis: int = 0,
        slots: int = 1,
        dropout: float = 0.0,
        behind_dropout: int = 0,
        extra: int = 0,
        side: Literal["video", "text", "both"] = "video",
    ) -> None:
        super().__init__()
        self.dimension = dimension
        self.basis = basis
        self.slots = slots
        self.extra = extra
        self.pair_dropout = dropout
        self.behind_dropout = behind_dropout
        self.side: Literal["video", "text", "both"] = side
        self.memory_gib: float | None = None
        self.required_form: type[Pairwise] | None = None

    def within(self, memory_gib: float | None) -> Self:
        """Set the memory budget, a method's `evaluation.memory_gib`, and return the head."""
        self.memory_gib = memory_gib
        return self

    @property
    def form(self) -> type[Pairwise]:
        """Form of pair vectors: factorized, or dense if D is at most K.

        Training with one vector per pair is dense on GPUs, where launching the additional operations of the factorized
        form takes longer than computing all elements.
        """
        if self.required_form is not None:
            return self.required_form
        on_cpu = loops_are_fast(next(self.parameters(), torch.empty(0)).device)
        few = self.training and torch.is_grad_enabled() and self.slots == 1 and not on_cpu
        return DensePairVectors if few or self.basis >= self.dimension else PairVectors

    def prepare(self, text: TextFeatures, video: VideoFeatures) -> tuple[Any, Any]:
        """Return the inputs of `score` for N texts and M videos, as records. Default: the features themselves."""
        return text, video

    @abstractmethod
    def score(self, text: Any, video: Any, *given: Any) -> Scores:
        """Score n prepared texts against m prepared videos: `similarity` (n, m), and parts (n, m, ...)."""

    def pair_numbers(self, text: Any, video: Any) -> int:
        """Return the number of elements per pair during scoring: several copies of its vectors, and `extra`."""
        if not self.basis:
            return self.extra
        if self.form is DensePairVectors:
            return 8 * self.slots * self.dimension + self.extra
        numbers = 8 * self.slots * (self.basis + 4) + self.extra
        if self.training and self.pair_dropout > 0:  # a mask byte per element
            numbers += self.slots * self.dimension * (1 + 4 * self.behind_dropout) // 4
        return numbers

    def forward(self, text: TextFeatures, video: VideoFeatures, *given: Any) -> Scores:
        """Score N texts against M videos in at least float32; `given` are additional arguments of `score`."""
        text, video = text.float(), video.float()
        with torch.autocast(text.sentence.device.type, enabled=False):
            return self.in_blocks(lambda some, few: self.score(some, few, *given), *self.prepare(text, video))

    def in_blocks(
        self, score: Callable[[Any, Any], Scores], text: FeatureBatch, video: FeatureBatch, extra: int = 0
    ) -> Scores:
        """Score N prepared texts against M prepared videos with `score`, block by block.

        `extra` is the number of elements per pair in addition to `pair_numbers`.
        """
        if torch.compiler.is_exporting():  # numbers of texts and videos are then symbols, which cannot be divided
            return score(text, video)
        tensor = next(tensor for tensor in text.tensors() if tensor.is_floating_point())
        order = self.order(text)
        scores = score_in_blocks(
            score,
            text if order is None else text[order],
            video,
            pair_bytes=tensor.element_size() * (self.pair_numbers(text, video) + extra),
            budget=self.block_bytes(tensor.device),
            few=self.side,
            kept=self.kept_bytes(tensor.device),
        )
        if order is None:
            return scores
        back = order.argsort()
        return Scores(scores.similarity[back], {name: part[back] for name, part in scores.parts.items()})

    def order(self, text: Any) -> Tensor | None:
        """Return the order (N,) int64 in which prepared texts are scored; None keeps their order."""
        return None

    def kept_bytes(self, device: torch.device) -> int:
        """Return the memory of all blocks together: half of the budget. The evaluator uses the other half."""
        return max(memory_budget(self.memory_gib, device) // 2, 1)

    def block_bytes(self, device: torch.device) -> int:
        """Return the memory of one block: the budget, on a CPU limited to the size of its caches."""
        # Vectors after dropout are processed in cache-sized tiles. If all are kept, joining blocks would copy them.
        joined = self.training and self.pair_dropout > 0 and self.behind_dropout > 0
        if not loops_are_fast(device) or joined:
            return self.kept_bytes(device)
        return min(self.kept_bytes(device), TRAINING_CACHE if torch.is_grad_enabled() else CACHES[self.side])

    def of_texts(self, vectors: Tensor, videos: int) -> Pairwise:
        """Return vectors (N, D) or (N, Q, D) of texts as pair vectors with `videos` videos."""
        return self.form.from_texts(vectors if vectors.ndim == 3 else vectors.unsqueeze(1), videos)

    def of_videos(self, vectors: Tensor, texts: int) -> Pairwise:
        """Return vectors (M, D) or (M, Q, D) of videos as pair vectors with `texts` texts."""
        return self.form.from_videos(vectors if vectors.ndim == 3 else vectors.unsqueeze(1), texts)
