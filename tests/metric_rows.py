"""Rows of results tables from ranks."""

from collections.abc import Sequence

from tvr_lightning.evaluation.metrics import rank_metrics
from tvr_lightning.evaluation.ranks import Ranks


def summarize(ranks: Ranks, recall: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Metrics of one direction by name."""
    return {name: value.item() for name, value in rank_metrics(recall)(ranks).items()}
