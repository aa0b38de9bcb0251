"""Recall at K, median rank, mean rank, nDCG and MRR as torchmetrics modules that accumulate ranks.

Recalls are percentages, as in the papers. Ties are resolved by the expectation under random tie-breaking, so a constant
similarity gives chance performance. (The released CLIP4Clip `compute_metrics` counts every tied position as a hit.)
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat
from typing_extensions import override

from tvr_lightning.evaluation.ranks import Ranks
from tvr_lightning.option_types import Count, check


class RankMetric(Metric):
    """Base class of metrics of one direction, computed from the ranks of all batches and processes.

    A subclass implements `value`. Recipes add it to the results table with `evaluation.metrics`; its column is named
    after the class unless it overrides `name`.

    Example:
        >>> class WorstRank(RankMetric):
        ...     def value(self, ranks):
        ...         return ranks.expected().max()
        >>> metric = WorstRank()
        >>> metric.update(Ranks(torch.tensor([0, 1]), torch.ones(2, dtype=torch.int64), torch.arange(2)))
        >>> metric.compute()
        tensor(2., dtype=torch.float64)
    """

    full_state_update = False
    better: list[Tensor]
    tied: list[Tensor]
    index: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for state in ("better", "tied", "index"):
            self.add_state(state, default=[], dist_reduce_fx="cat")
        self.set_dtype(torch.int64)  # of the empty states that a process without queries sends to the others

    @property
    def name(self) -> str:
        """Name of the metric's column."""
        return type(self).__name__

    @abstractmethod
    def value(self, ranks: Ranks) -> Tensor:
        """Return the metric for the ranks of Q queries, a scalar."""

    def update(self, ranks: Ranks) -> None:
        """Add the ranks of some queries. An index that occurs twice, because a sampler padded a batch, counts once."""
        ranks = ranks.to(self.device)
        self.better.append(ranks.better)
        self.tied.append(ranks.tied)
        self.index.append(ranks.index)

    def compute(self) -> Tensor:
        """Return the metric, NaN without queries."""
        if not len(self.index):
            return torch.tensor(float("nan"), device=self.device)
        ranks = Ranks(dim_zero_cat(self.better), dim_zero_cat(self.tied), dim_zero_cat(self.index)).deduplicated()
        return self.value(ranks) if len(ranks) else torch.tensor(float("nan"), device=self.device)


class QueryMean(RankMetric):
    """Base class of metrics that are the mean of a value per query; `tvr evaluate` also computes their intervals."""

    @abstractmethod
    def values(self, ranks: Ranks) -> Tensor:
        """Return the value of each of Q queries, (Q,) float64."""

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return self.values(ranks).mean()


class FirstK(QueryMean):
    """Base class of metrics that count the matches among the first K items."""

    title: str

    def __init__(self, k: Count = 10) -> None:
        super().__init__()
        self.k = k
        check(self)

    @property
    @override
    def name(self) -> str:
        return f"{self.title}@{self.k}"


class RecallAtK(FirstK):
    """Percentage of queries whose match is among the first K.

    Example:
        >>> ranks = Ranks(torch.tensor([0, 2, 7]), torch.ones(3, dtype=torch.int64), torch.arange(3))
        >>> RecallAtK(5).value(ranks)  # the matches are first, third and eighth
        tensor(66.6667, dtype=torch.float64)
    """

    title = "R"

    @override
    def values(self, ranks: Ranks) -> Tensor:
        return 100.0 * ranks.found_within(self.k)


class RecallSum(RankMetric):
    """Sum of the recalls at several K in one direction."""

    name = "RSum"

    def __init__(self, recall: Sequence[int]) -> None:
        super().__init__()
        self.recall = recall

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return torch.stack([100.0 * ranks.found_within(k).mean() for k in self.recall]).sum()


class MedianRank(RankMetric):
    """Median of the expected ranks, from 1; the mean of the middle two if the number of queries is even."""

    name = "MdR"

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return ranks.expected().quantile(0.5)


class MeanRank(QueryMean):
    """Mean of the expected ranks, from 1."""

    name = "MnR"

    @override
    def values(self, ranks: Ranks) -> Tensor:
        return ranks.expected()


class NDCG(FirstK):
    """Normalized discounted cumulative gain at K in percent: the mean of 1 / log2(1 + rank), or of 0 after rank K.

    Every query has one match, so the ideal gain is 1.

    Example:
        >>> ranks = Ranks(torch.tensor([0, 1, 17]), torch.ones(3, dtype=torch.int64), torch.arange(3))
        >>> NDCG().value(ranks)  # the mean of 100, 63.0930 and 0
        tensor(54.3643, dtype=torch.float64)
    """

    title = "nDCG"

    @override
    def values(self, ranks: Ranks) -> Tensor:
        return 100.0 * ranks.discounted_within(self.k)


class MRR(QueryMean):
    """Mean reciprocal rank in percent.

    Example:
        >>> ranks = Ranks(torch.tensor([0, 1, 3]), torch.ones(3, dtype=torch.int64), torch.arange(3))
        >>> MRR().value(ranks)  # the mean of 100, 50 and 25
        tensor(58.3333, dtype=torch.float64)
    """

    @override
    def values(self, ranks: Ranks) -> Tensor:
        return 100.0 * ranks.reciprocal()


def rank_metrics(recall: Sequence[int] = (1, 5, 10), more: Iterable[RankMetric] = ()) -> MetricCollection:
    """Return the metrics of one direction by name: `R@K` for every K in `recall`, `MdR`, `MnR`, `RSum`, and `more`.

    Example:
        >>> ranks = Ranks(torch.tensor([0, 2, 7]), torch.ones(3, dtype=torch.int64), torch.arange(3))
        >>> {name: round(value.item(), 1) for name, value in rank_metrics()(ranks).items()}
        {'R@1': 33.3, 'R@5': 66.7, 'R@10': 100.0, 'MdR': 3.0, 'MnR': 4.0, 'RSum': 200.0}
    """
    metrics: list[RankMetric] = [*map(RecallAtK, recall), MedianRank(), MeanRank(), RecallSum(recall)]
    # Each metric is logged, synchronized and reset on its own, so they must not share their states.
    collection = MetricCollection([], compute_groups=False)
    for metric in [*metrics, *map(deepcopy, more)]:
        collection.add_metrics({str(metric.name): metric})  # several at once would be sorted by name
    return collection


class RetrievalMetrics(nn.Module):
    """Metrics of both directions of retrieval: those of `rank_metrics`, and SumR, the sum of all recalls.

    Example:
        >>> metrics = RetrievalMetrics()
        >>> ranks = Ranks(torch.tensor([0, 2, 7]), torch.ones(3, dtype=torch.int64), torch.arange(3))
        >>> metrics.update(ranks, ranks)
        >>> metrics.sum_of_recalls.compute()
        tensor(400., dtype=torch.float64)
    """

    def __init__(self, recall: Sequence[int] = (1, 5, 10), more: Sequence[RankMetric] = ()) -> None:
        super().__init__()
        self.text_to_video = rank_metrics(recall, more)
        self.video_to_text = rank_metrics(recall, more)
        self.sum_of_recalls = self.text_to_video["RSum"] + self.video_to_text["RSum"]

    def update(self, texts: Ranks, videos: Ranks) -> None:
        """Add the ranks of some text queries and some video queries."""
        self.text_to_video.update(texts)
        self.video_to_text.update(videos)

    def reset(self) -> None:
        """Remove all ranks."""
        self.text_to_video.reset()
        self.video_to_text.reset()

    def named(self) -> dict[str, Metric]:
        """Return all metrics by the names under which they are logged, such as `t2v_R@1` and `SumR`."""
        texts = {f"t2v_{name}": metric for name, metric in self.text_to_video.items()}
        videos = {f"v2t_{name}": metric for name, metric in self.video_to_text.items()}
        return texts | videos | {"SumR": self.sum_of_recalls}
