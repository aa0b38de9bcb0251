"""Metrics of text-video retrieval as torchmetrics modules: R@K, median and mean rank, MRR, nDCG, and sums of recalls.

Recalls are percentages, as in the papers. Ties are resolved by the expectation under random tie-breaking, so a constant
similarity gives chance performance. (The released CLIP4Clip `compute_metrics` counts every tied position as a hit.)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count, check
from tvr_lightning.ranks import Ranks, count_ranks, raise_on_nan, text_to_video_ranks, video_to_text_ranks

Direction = Literal["text-to-video", "video-to-text"]


class RankMetric(Metric, ABC):
    """Base class of metrics of the ranks of all queries.

    A subclass implements `value`. Recipes add it to the results table with `evaluation.metrics`; its column is named
    after the class unless it overrides `name`.

    Args:
        direction: Text-to-video, which accumulates ranks, or video-to-text, which accumulates the scores of all texts.
        kwargs: Arguments of torchmetrics, such as `compute_on_cpu` to keep these scores in main memory.
    """

    is_differentiable = False
    full_state_update = False
    similarity: list[Tensor]

    def __init__(self, direction: Direction = "text-to-video", **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": _gather, **kwargs})
        self.direction = direction
        self.states = ("better", "tied", "starts") if direction == "text-to-video" else ("similarity", "match")
        for state in self.states:
            self.add_state(state, default=[], dist_reduce_fx="cat")
        self.set_dtype(torch.int64)  # of the empty states of a process without queries, which must not change others
        check(self)

    @property
    def name(self) -> str:
        """Name of the metric's column."""
        return type(self).__name__

    @abstractmethod
    def value(self, ranks: Ranks) -> Tensor:
        """Return the metric for the ranks of Q queries, a scalar."""

    def of(self, ranks: Ranks) -> Tensor:
        """Return the metric for the ranks of Q queries, NaN without queries, a scalar."""
        return self.value(ranks) if len(ranks) else torch.tensor(float("nan"), device=ranks.better.device)

    def update(self, similarity: Tensor, match: Tensor) -> None:
        """Add some texts with their scores.

        Args:
            similarity: Scores (N, M) of N texts against all M videos of the gallery.
            match: Column of each text's video, (N,) int64. In video-to-text, a video is then represented by its best
                text. If texts have several videos or none, a boolean (N, M), with which texts are ranked individually.

        Raises:
            UserError: A shape does not fit, a score is NaN, or a column does not exist.
        """
        similarity = similarity.detach()
        match = match.to(similarity.device)
        _check_inputs(similarity, match)
        match = match if match.dtype == torch.bool else match.long()
        if self.direction == "text-to-video":
            ranks = count_ranks(similarity, match)
            starts = ranks.index.diff(prepend=ranks.index.new_tensor([-1])) > 0  # at the first match of each text
            found: tuple[Tensor, ...] = (ranks.better, ranks.tied, starts)
        else:
            found = (similarity, match)
            if len(self.similarity) and self.similarity[0].shape[1:] != similarity.shape[1:]:
                raise UserError(
                    f"similarity has {similarity.shape[1]} columns, but that of earlier texts has "
                    f"{self.similarity[0].shape[1]}. Pass the scores of each text against all videos."
                )
        for state, values in zip(self.states, found, strict=True):
            getattr(self, state).append(values.to(self.device))

    def compute(self) -> Tensor:
        """Return the metric, NaN without queries."""
        states = [getattr(self, state) for state in self.states]
        if not len(states[0]):
            return torch.tensor(float("nan"), device=self.device)
        if self.direction == "text-to-video":
            better, tied, starts = map(dim_zero_cat, states)
            return self.of(Ranks(better, tied, starts.cumsum(0)))
        similarity, match = map(dim_zero_cat, states)
        return self.of_scores(similarity, match.bool() if match.ndim == 2 else match)

    def of_scores(self, similarity: Tensor, match: Tensor) -> Tensor:
        """Return the metric of video-to-text retrieval for the scores (N, M) of all texts, a scalar."""
        return self.of(video_to_text_ranks(similarity, match))


def _gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the states of all processes; torchmetrics' own function cannot gather a matrix and an empty list."""
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, tensor.cpu(), group)
    return [part.to(tensor.device) for part in parts]


def _check_inputs(similarity: Tensor, match: Tensor) -> None:
    shape = tuple(similarity.shape)
    several = match.dtype == torch.bool
    if similarity.ndim != 2 or not similarity.is_floating_point():
        raise UserError(f"similarity is {similarity.dtype} of shape {shape}. Pass a floating-point matrix (N, M).")
    if tuple(match.shape) != (shape if several else shape[:1]) or match.is_floating_point():
        raise UserError(
            f"match is {match.dtype} of shape {tuple(match.shape)}, but similarity has shape {shape}. "
            f"Pass the column of each text's video ({shape[0]},) as integers, or a boolean matrix {shape}."
        )
    raise_on_nan(similarity)
    wrong = match[(match < 0) | (match >= shape[1])]
    if len(wrong) and not several:
        raise UserError(f"match contains {int(wrong[0])}, but similarity has only the columns 0 to {shape[1] - 1}.")


class FirstK(RankMetric):
    """Base class of metrics in percent that count the matches among the first K items."""

    higher_is_better = True
    title: str

    def __init__(self, k: Count = 10, direction: Direction = "text-to-video", **kwargs: Any) -> None:
        self.k = k
        super().__init__(direction, **kwargs)

    @property
    @override
    def name(self) -> str:
        return f"{self.title}@{self.k}"


class RetrievalRecall(FirstK):
    """Percentage of the queries with a match among the first K, a scalar.

    Example:
        >>> similarity = torch.tensor([[0.9, 0.2, 0.1], [0.8, 0.7, 0.6], [0.5, 0.4, 0.3]])
        >>> metric = RetrievalRecall(k=2)
        >>> metric(similarity, torch.arange(3))  # the matches are first, second and third
        tensor(66.6667, dtype=torch.float64)
    """

    title = "R"

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return 100.0 * ranks.found_within(self.k).mean()


class RecallSum(RankMetric):
    """Sum of the recalls of scores (N, M) at several K, in one direction (RSum) or both (SumR, `direction` None)."""

    higher_is_better = True

    def __init__(
        self, recall: Sequence[int] = (1, 5, 10), direction: Direction | None = "text-to-video", **kwargs: Any
    ) -> None:
        super().__init__(direction, **kwargs)  # type: ignore[arg-type]
        self.recall = tuple(recall)

    @property
    @override
    def name(self) -> str:
        return "RSum" if self.direction else "SumR"

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return torch.stack([100.0 * ranks.found_within(k).mean() for k in self.recall]).sum()

    @override
    def of_scores(self, similarity: Tensor, match: Tensor) -> Tensor:
        videos = super().of_scores(similarity, match)
        return videos if self.direction else videos + self.of(text_to_video_ranks(similarity, match))


class MedianRank(RankMetric):
    """Median of the expected ranks from 1, a scalar; the mean of the middle two if the number of queries is even."""

    name = "MdR"
    higher_is_better = False

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return ranks.expected().quantile(0.5)


class MeanRank(RankMetric):
    """Mean of the expected ranks from 1, a scalar."""

    name = "MnR"
    higher_is_better = False

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return ranks.expected().mean()


class NDCG(FirstK):
    """Normalized discounted cumulative gain at K in percent, a scalar.

    The gain of a match is 1 / log2(1 + rank), or 0 after rank K. The sum of a query's gains is divided by the greatest
    possible sum, which is 1 for one match.
    """

    title = "nDCG"

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return 100.0 * ranks.normalized_gain(self.k).mean()


class MRR(RankMetric):
    """Mean reciprocal rank in percent, a scalar."""

    higher_is_better = True

    @override
    def value(self, ranks: Ranks) -> Tensor:
        return 100.0 * ranks.reciprocal().mean()


def direction_metrics(recall: Sequence[int] = (1, 5, 10), direction: Direction = "text-to-video") -> list[RankMetric]:
    """Return the metrics of one direction in most papers: R@K for every K in `recall`, MdR, MnR, and RSum."""
    recalls = [RetrievalRecall(k, direction) for k in recall]
    return [*recalls, MedianRank(direction), MeanRank(direction), RecallSum(recall, direction)]


def retrieval_metrics(recall: Sequence[int] = (1, 5, 10)) -> MetricCollection:
    """Return the metrics of most papers in both directions, which share the ranks, and SumR, the sum of all recalls.

    Example:
        >>> metrics = retrieval_metrics(recall=[1, 5])
        >>> metrics.update(torch.tensor([[0.9, 0.2, 0.1], [0.8, 0.7, 0.6]]), torch.arange(2))
        >>> {name: value.item() for name, value in metrics.compute().items()}  # doctest: +NORMALIZE_WHITESPACE
        {'t2v_R@1': 50.0, 't2v_R@5': 100.0, 't2v_MdR': 1.5, 't2v_MnR': 1.5, 't2v_RSum': 150.0,
         'v2t_R@1': 100.0, 'v2t_R@5': 100.0, 'v2t_MdR': 1.0, 'v2t_MnR': 1.0, 'v2t_RSum': 200.0, 'SumR': 350.0}
    """
    collection = MetricCollection([])
    for metric in (*direction_metrics(recall), *direction_metrics(recall, "video-to-text"), RecallSum(recall, None)):
        short = {"text-to-video": "t2v_", "video-to-text": "v2t_"}.get(metric.direction, "")
        collection.add_metrics({f"{short}{metric.name}": metric})  # several at once would be sorted by name
    return collection
