"""How a method is evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tvr_lightning.evaluation.normalization import Normalizer


@dataclass
class EvaluationConfig:
    """How scores become a table.

    Attributes:
        recall: the K of the reported R@K, ascending (ActivityNet tables report 50).
        seed: of the orders in which texts and videos are scored, so that a place says nothing about a pair.
        memory_gib: budget in GiB for what scoring holds at a time.
        top_k: how many videos `tvr predict` writes for every text.
        normalization: post-processing of the scores, in evaluation and prediction; none where it is not given. Recipes
            name it by class: `DualSoftmax`, `QueryBankNorm`, `SinkhornBias`, `TwoStage`, or several as a
            `NormalizerChain`.
        bank_size: most training texts and most training videos that stand for users' queries where the normalisation
            asks for some; drawn by `seed`. The methods' own queues have their own sizes.
        balance: also measure how evenly texts and videos are retrieved (NCL, Eq. 5 and Fig. 3), after normalisation.
        audit: how many videos of the split the method is audited for leakage on, after a test or validation by `tvr`
            (4 or more); 0 leaves the table unaudited.
    """

    recall: list[int] = field(default_factory=lambda: [1, 5, 10])
    seed: int = 0
    memory_gib: float = 2.0
    top_k: int = 10
    normalization: Normalizer | None = None
    bank_size: int = 16384
    balance: bool = False
    audit: int = 64

    def __post_init__(self) -> None:
        if not self.recall or sorted(set(self.recall)) != list(self.recall) or self.recall[0] < 1:
            raise ValueError(f"evaluation.recall must be ascending whole numbers from 1 on, not {self.recall}")
        if self.memory_gib <= 0:
            raise ValueError(f"evaluation.memory_gib must be positive, not {self.memory_gib}")
        if self.top_k < 1:
            raise ValueError(f"evaluation.top_k must be at least 1, not {self.top_k}")
        if self.audit and self.audit < 4:
            raise ValueError(f"evaluation.audit must be at least 4, or 0 for no audit, not {self.audit}")
        if self.bank_size < 1:
            raise ValueError(f"evaluation.bank_size must be at least 1, not {self.bank_size}")

    @property
    def memory_bytes(self) -> int:
        """What scoring may hold at a time, in bytes."""
        return int(self.memory_gib * 2**30)


def gibibytes(size: str) -> float:
    """Return a size such as "4GiB" or "512MiB" in GiB.

    Raises:
        ValueError: no number before KiB, MiB, GiB or TiB, or zero.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])iB\s*", size)
    if found is None or not float(found[1]):
        raise ValueError(f"--eval-memory {size}: expected a size such as 4GiB or 512MiB")
    return float(found[1]) * 1024.0 ** ("KMGT".index(found[2]) - 2)
