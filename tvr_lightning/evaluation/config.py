"""Settings for the evaluation of a method."""

from dataclasses import dataclass, field
from typing import Annotated

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.normalization import Normalizer
from tvr_lightning.metrics import RankMetric
from tvr_lightning.option_types import Count, Options, Range, Role


@dataclass
class EvaluationConfig(Options):
    """Settings for turning scores into a results table.

    Attributes:
        recall: values of K for R@K, in ascending order (ActivityNet tables report R@50).
        metrics: further metrics of each direction for the results table and logs, named by class (`RankMetric`).
        seed: seed for the random order in which texts and videos are scored, so that positions reveal nothing about
            pairs.
        memory_gib: memory budget for scoring, in GiB.
        top_k: number of videos that `tvr predict` writes for every text.
        normalization: post-processing of the scores in evaluation and prediction; none by default. Recipes name it by
            class: `DualSoftmax`, `QueryBankNorm`, `SinkhornBias`, or `TwoStage`.
        bank_size: maximum number of training texts and of training videos that a normalization can use as stand-ins for
            user queries, sampled with `seed`. The queues of methods have their own sizes.
        balance: measurement of the balance with which texts and videos are retrieved (NCL, Eq. 5 and Fig. 3), after
            normalization.
        audit: number of videos in the leakage audit after each test or validation run (at least 4). 0 disables the
            audit.
    """

    recall: list[int] = field(default_factory=lambda: [1, 5, 10])
    metrics: list[RankMetric] = field(default_factory=list)
    seed: int = 0
    memory_gib: Annotated[float, Range(above=0), Role.MACHINE] = 2.0
    top_k: Count = 10
    normalization: Normalizer | None = None
    bank_size: Count = 16384
    balance: bool = False
    audit: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.recall or sorted(set(self.recall)) != list(self.recall) or self.recall[0] < 1:
            raise UserError(
                f"evaluation.recall is {self.recall}; it must be ascending numbers of at least 1, such as [1, 5, 10]"
            )
        names = [metric.name for metric in self.metrics]
        if len(set(names)) < len(names):
            raise UserError(f"evaluation.metrics has several metrics with one name ({', '.join(names)}). Rename one.")
        if any(metric.direction != "text-to-video" for metric in self.metrics):
            raise UserError("evaluation.metrics are computed in both directions. Remove `direction` from them.")
        if self.audit and self.audit < 4:
            raise UserError(f"evaluation.audit must be at least 4, or 0 for no audit, not {self.audit}")

    @property
    def memory_bytes(self) -> int:
        """Return the memory budget for scoring in bytes."""
        return int(self.memory_gib * 2**30)
