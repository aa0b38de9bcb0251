"""Metrics of ranks compared with a plain restatement."""

import math
import statistics

import pytest
import torch
from metric_rows import summarize

from tvr_lightning.evaluation.metrics import MRR, NDCG, MeanRank, MedianRank, RankMetric, RecallAtK, RetrievalMetrics
from tvr_lightning.evaluation.ranks import Ranks, count_ranks


@pytest.mark.parametrize("queries", [1, 2, 31, 32])
def test_metrics_equal_a_plain_restatement(queries):
    scores = torch.randn(queries, 50, generator=torch.Generator().manual_seed(queries))
    match = torch.arange(queries)
    places = [sorted(row, reverse=True).index(row[i]) + 1 for i, row in enumerate(scores.tolist())]
    ranks = count_ranks(scores, match)
    for k in (1, 5, 50):
        assert RecallAtK(k).value(ranks).item() == pytest.approx(100 * sum(place <= k for place in places) / queries)
    assert MedianRank().value(ranks).item() == statistics.median(places)
    assert MeanRank().value(ranks).item() == pytest.approx(statistics.mean(places))


@pytest.mark.parametrize("k", [1, 10, 100])
def test_ndcg_and_mrr_are_expectations_over_the_order_of_ties(k):
    ranks = Ranks(torch.tensor([0, 0, 3, 8, 12]), torch.tensor([1, 7, 4, 9, 1]), torch.arange(5))
    possible = [range(better + 1, better + tied + 1) for better, tied in zip(ranks.better, ranks.tied, strict=True)]
    gains = [[1 / math.log2(1 + rank) if rank <= k else 0 for rank in places] for places in possible]
    expected = statistics.mean(map(statistics.mean, gains))
    assert NDCG(k).value(ranks).item() == pytest.approx(100 * expected)
    expected = statistics.mean(statistics.mean(1 / int(rank) for rank in places) for places in possible)
    assert MRR().value(ranks).item() == pytest.approx(100 * expected)


def test_sums_add_the_configured_recalls():
    ranks = count_ranks(torch.randn(20, 80, generator=torch.Generator().manual_seed(0)), torch.arange(20))
    row = summarize(ranks, recall=(1, 50))
    assert list(row) == ["R@1", "R@50", "MdR", "MnR", "RSum"]
    assert row["RSum"] == row["R@1"] + row["R@50"]
    metrics = RetrievalMetrics((1, 50))
    metrics.update(ranks, ranks)
    assert metrics.sum_of_recalls.compute().item() == 2 * row["RSum"]


def test_batches_and_repetitions_do_not_change_a_metric():
    scores = torch.randn(23, 60, generator=torch.Generator().manual_seed(1))
    ranks = count_ranks(scores, torch.arange(23))
    modules = {"R@5": RecallAtK(5), "MdR": MedianRank(), "MnR": MeanRank()}
    expected = summarize(ranks)
    for name, metric in modules.items():
        for start in range(0, 23, 4):
            metric.update(ranks[start : start + 6])
        assert metric.compute().item() == pytest.approx(expected[name])
        metric.reset()
        with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(ValueError, match="No samples"):
            metric.compute()


def test_metrics_without_samples_are_nan_and_k_must_be_positive():
    nothing = torch.empty(0, dtype=torch.int64)
    metrics = RetrievalMetrics()
    metrics.update(*[Ranks(nothing, nothing, nothing)] * 2)
    assert all(metric.compute().isnan() for metric in metrics.named().values())
    for metric, k in ((NDCG, 0), (RecallAtK, 0), (RecallAtK, -5)):
        with pytest.raises(ValueError, match=f"{metric.__name__}.k is {k}; it must be at least 1"):
            metric(k)


class WorstRank(RankMetric):
    """A metric as users write it."""

    def value(self, ranks: Ranks) -> torch.Tensor:
        return ranks.expected().max()


def test_a_user_defined_metric_is_reported_for_both_directions():
    ranks = count_ranks(torch.randn(11, 30, generator=torch.Generator().manual_seed(2)), torch.arange(11))
    metrics = RetrievalMetrics((1,), [WorstRank()])
    metrics.update(ranks, ranks[:3])
    assert list(metrics.named())[:5] == ["t2v_R@1", "t2v_MdR", "t2v_MnR", "t2v_RSum", "t2v_WorstRank"]
    assert metrics.text_to_video["WorstRank"].compute() == ranks.expected().max()
    assert metrics.video_to_text["WorstRank"].compute() == ranks[:3].expected().max()
