"""Recall at K, median rank and mean rank: pure functions of ranks, and torchmetrics modules that accumulate ranks.

Recalls are percentages, as in the papers. Ties are resolved by the expectation under random tie-breaking, so a constant
similarity gives chance performance. (The released CLIP4Clip `compute_metrics` counts every tied position as a hit.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.ranks import Ranks


def recall_at_k(ranks: Ranks, k: int) -> float:
    """Return the percentage of queries whose match is among the first `k`.

    Raises:
        UserError: There is no query, or `k` is below 1.

    Example:
        >>> ranks = Ranks(better=torch.tensor([0, 2, 7]), tied=torch.ones(3, dtype=torch.int64), index=torch.arange(3))
        >>> round(recall_at_k(ranks, 5), 2)  # the matches are first, third and eighth
        66.67
    """
    _need_queries(ranks)
    return 100.0 * float(ranks.found_within(k).mean())


def median_rank(ranks: Ranks) -> float:
    """Return the median of the expected ranks, from 1; the mean of the middle two if the number of queries is even.

    Raises:
        UserError: There is no query.

    Example:
        >>> ranks = Ranks(better=torch.tensor([0, 2, 7]), tied=torch.ones(3, dtype=torch.int64), index=torch.arange(3))
        >>> median_rank(ranks)
        3.0
    """
    _need_queries(ranks)
    expected = ranks.expected().sort().values
    middle = len(expected) // 2
    return float(expected[middle] if len(expected) % 2 else (expected[middle - 1] + expected[middle]) / 2)


def mean_rank(ranks: Ranks) -> float:
    """Return the mean of the expected ranks, from 1.

    Raises:
        UserError: There is no query.

    Example:
        >>> ranks = Ranks(better=torch.tensor([0, 2, 7]), tied=torch.ones(3, dtype=torch.int64), index=torch.arange(3))
        >>> mean_rank(ranks)
        4.0
    """
    _need_queries(ranks)
    return float(ranks.expected().mean())


def summarize(ranks: Ranks, recall: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Return the row of a results table for one direction.

    Args:
        ranks: Ranks of the direction's queries, each query once.
        recall: Values of K for R@K, each at least 1.

    Returns:
        `R@K` for every K in percent, `MdR` and `MnR` (median and mean rank), and `RSum`, the sum of the recalls.

    Raises:
        UserError: There is no query, or a K is below 1.

    Example:
        >>> ranks = Ranks(better=torch.tensor([0, 2, 7]), tied=torch.ones(3, dtype=torch.int64), index=torch.arange(3))
        >>> {name: round(value, 1) for name, value in summarize(ranks).items()}
        {'R@1': 33.3, 'R@5': 66.7, 'R@10': 100.0, 'MdR': 3.0, 'MnR': 4.0, 'RSum': 200.0}
    """
    row = {f"R@{k}": recall_at_k(ranks, k) for k in recall}
    total = sum(row.values())
    return row | {"MdR": median_rank(ranks), "MnR": mean_rank(ranks), "RSum": total}


def sum_of_recalls(text_to_video: dict[str, float], video_to_text: dict[str, float]) -> float:
    """Return SumR, the sum of the recalls of both directions (percent, at most 200 times the number of K).

    Example:
        >>> sum_of_recalls({"RSum": 205.0}, {"RSum": 203.5})
        408.5
    """
    return text_to_video["RSum"] + video_to_text["RSum"]


class RankMetric(Metric):
    """Base class of metrics that need all ranks, accumulated over batches and processes.

    `update` takes `Ranks` (Q,). A query that occurs twice, because a sampler padded the last batch, counts once.
    """

    full_state_update = False
    better: list[Tensor]
    tied: list[Tensor]
    index: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("better", "tied", "index"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, ranks: Ranks) -> None:
        """Add the ranks of some queries."""
        self.better.append(ranks.better)
        self.tied.append(ranks.tied)
        self.index.append(ranks.index)

    def ranks(self) -> Ranks:
        """Return the accumulated ranks, each query once.

        Raises:
            UserError: There are no ranks, or a query has two different ranks.
        """
        if not len(self.index):
            raise UserError(f"{type(self).__name__} has no queries. Call update before compute.")
        gathered = Ranks(dim_zero_cat(self.better), dim_zero_cat(self.tied), dim_zero_cat(self.index))
        return gathered.deduplicated()

    def _result(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device)


class RecallAtK(RankMetric):
    """Percentage of queries whose match is among the first K, a scalar.

    Example:
        >>> metric = RecallAtK(5)
        >>> metric.update(Ranks(torch.tensor([0, 2, 7]), torch.ones(3, dtype=torch.int64), torch.arange(3)))
        >>> metric.compute()
        tensor(66.6667)
    """

    higher_is_better = True

    def __init__(self, k: int) -> None:
        super().__init__()
        if k < 1:
            raise UserError(f"recall at K needs K >= 1, got {k}")
        self.k = k

    def compute(self) -> Tensor:
        """Return the percentage."""
        return self._result(recall_at_k(self.ranks(), self.k))


class MedianRank(RankMetric):
    """Median rank of the matches, from 1, a scalar.

    Example:
        >>> metric = MedianRank()
        >>> metric.update(Ranks(torch.tensor([0, 2, 7]), torch.ones(3, dtype=torch.int64), torch.arange(3)))
        >>> metric.compute()
        tensor(3.)
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the median."""
        return self._result(median_rank(self.ranks()))


class MeanRank(RankMetric):
    """Mean rank of the matches, from 1, a scalar.

    Example:
        >>> metric = MeanRank()
        >>> metric.update(Ranks(torch.tensor([0, 2, 7]), torch.ones(3, dtype=torch.int64), torch.arange(3)))
        >>> metric.compute()
        tensor(4.)
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the mean."""
        return self._result(mean_rank(self.ranks()))


class RetrievalMetrics(RankMetric):
    """Complete row of a results table for one direction, scalars by name, from one set of ranks.

    Args:
        recall: values of K for R@K.

    Example:
        >>> metric = RetrievalMetrics(recall=(1, 5))
        >>> metric.update(Ranks(torch.tensor([0, 2, 7]), torch.ones(3, dtype=torch.int64), torch.arange(3)))
        >>> metric.compute()["R@5"]
        tensor(66.6667)
    """

    def __init__(self, recall: Sequence[int] = (1, 5, 10)) -> None:
        super().__init__()
        if not recall or min(recall) < 1:
            raise UserError(f"recall at K needs at least one K and every K >= 1, got {tuple(recall)}")
        self.recall = tuple(recall)

    def compute(self) -> dict[str, Tensor]:
        """Return `R@K` for every K, `MdR`, `MnR` and `RSum` as scalars."""
        return {name: self._result(value) for name, value in summarize(self.ranks(), self.recall).items()}


def _need_queries(ranks: Ranks) -> None:
    if len(ranks) == 0:
        raise UserError("No query was ranked, so the metric has no value.")
