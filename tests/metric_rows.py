"""Metrics of ranks and of complete matrices."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tvr_lightning.evaluation.balance import balance
from tvr_lightning.evaluation.metrics import rank_metrics
from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.evaluation.sources import MatrixSource


def summarize(ranks: Ranks, recall: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Metrics of one direction by name."""
    return {name: value.item() for name, value in rank_metrics(recall)(ranks).items()}


def normalization_error(similarity: Tensor, temperature: float) -> float:
    """Normalization error of the gallery of a square matrix whose diagonal matches."""
    own = torch.arange(len(similarity))
    return balance(MatrixSource(similarity), temperature, own, own).error
