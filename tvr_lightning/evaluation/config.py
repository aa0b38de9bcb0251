"""Settings for the evaluation of a method."""

import functools
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.normalization import Normalizer
from tvr_lightning.metrics import RankMetric, direction_metrics
from tvr_lightning.option_types import Count, Options, Positive, Range, Role

GIB = 2**30
MIB = 2**20


def memory_budget(gib: float | None, device: torch.device) -> int:
    """Return the memory budget for scores on a device, in bytes: `gib`, or the default of the device.

    The default is 2 GiB; on a GPU without gradients, it is a quarter of the memory that is free at the first call, and
    at most 32 GiB. In training, it does not depend on free memory, because dropout masks depend on the blocks.
    """
    if gib is not None:
        return max(int(gib * GIB), 1)
    if device.type != "cuda" or torch.is_grad_enabled():
        return 2 * GIB
    return _free_quarter(device)


@functools.cache
def _free_quarter(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < 256 * MIB:
        raise UserError(
            f"{device} has only {free // MIB} MiB of free memory. Stop programs that use it, or choose another GPU"
        )
    return min(free // 4, 32 * GIB)


@dataclass
class EvaluationConfig(Options):
    """Settings for turning scores into a results table.

    Attributes:
        recall: values of K for R@K, in ascending order (ActivityNet tables report R@50).
        metrics: further metrics of each direction for the results table and logs, named by class (`RankMetric`).
        seed: seed for the random order in which texts and videos are scored, so that positions reveal nothing about
            pairs.
        memory_gib: memory budget for scoring, in GiB. By default, it is 2, or in evaluation on a GPU a quarter of the
            free memory, at most 32.
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
    memory_gib: Annotated[Positive | None, Role.MACHINE] = None
    top_k: Count = 10
    normalization: Normalizer | None = None
    bank_size: Count = 16384
    balance: bool = False
    audit: Annotated[int, Range(at_least=4)] | Literal[0] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.recall or sorted(set(self.recall)) != list(self.recall) or self.recall[0] < 1:
            raise UserError(
                f"evaluation.recall is {self.recall}; it must be ascending numbers of at least 1, such as [1, 5, 10]"
            )
        names = [metric.name for metric in (*direction_metrics(self.recall), *self.metrics)]
        if len(set(names)) < len(names):
            raise UserError(f"evaluation has several metrics with one name ({', '.join(names)}). Remove or rename one.")
        if any(metric.direction != "text-to-video" for metric in self.metrics):
            raise UserError("evaluation.metrics are computed in both directions. Remove `direction` from them.")
