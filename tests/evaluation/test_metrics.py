"""Metrics of ranks compared with a plain restatement."""

import math
import statistics

import pytest
import torch
from metric_rows import summarize

from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.metrics import MRR, NDCG, MeanRank, MedianRank, RankMetric, RecallAtK, RetrievalMetrics
from tvr_lightning.evaluation.ranks import Ranks, count_ranks, text_to_video_ranks, video_to_text_ranks
from tvr_lightning.testing import run_processes


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
    ranks = count_ranks(scores, torch.arange(23), torch.arange(23))
    modules = {"R@5": RecallAtK(5), "MdR": MedianRank(), "MnR": MeanRank()}
    expected = summarize(ranks)
    for name, metric in modules.items():
        for start in range(0, 23, 4):
            metric.update(ranks[start : start + 6])
        assert metric.compute().item() == pytest.approx(expected[name])
        metric.reset()
        with pytest.warns(UserWarning, match="before the ``update``"):
            assert metric.compute().isnan()


@pytest.mark.parametrize("direction", [text_to_video_ranks, video_to_text_ranks])
def test_batches_whose_queries_have_no_index_all_count(direction):
    metric, own = RecallAtK(1), torch.arange(3)
    for batch in (torch.eye(3), torch.eye(3).roll(1, 0)):
        metric.update(direction(batch, own))
    assert metric.compute() == 50.0
    metric.reset()
    for _ in range(2):
        metric.update(direction(torch.eye(3), own, torch.tensor([7, 8, 9])))
    metric.update(direction(torch.eye(3).roll(1, 0), own, torch.tensor([17, 18, 19])))
    assert metric.compute() == 50.0


@pytest.mark.parametrize("other", [{"better": 1}, {"tied": 2}], ids=str)
def test_two_ranks_of_one_query_are_refused(other):
    metric = RecallAtK(1)
    metric.update(Ranks(torch.tensor([4, 0]), torch.tensor([1, 1]), torch.tensor([3, 5])))
    counts = {name: torch.tensor([value]) for name, value in ({"better": 0, "tied": 1} | other).items()}
    metric.update(Ranks(**counts, index=torch.tensor([5])))
    with pytest.raises(UserError, match="query 5 has two different ranks"):
        metric.compute()


def compute_on_uneven_processes(rank: int) -> list[float]:
    """Metrics of two queries of the first process and none of the second, and then of none of both."""
    metric = RecallAtK(1)
    if rank == 0:
        metric.update(Ranks(torch.tensor([4, 0]), torch.tensor([1, 1]), torch.tensor([3, 5])))
    found = [metric.compute().item()]
    metric.reset()
    return [*found, metric.compute().item()]


def test_a_process_without_queries_computes_what_the_others_do():
    assert run_processes(compute_on_uneven_processes, 2) == [[50.0, pytest.approx(math.nan, nan_ok=True)]] * 2


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
