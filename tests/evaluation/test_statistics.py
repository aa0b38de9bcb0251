"""Bootstrap intervals and paired tests against scipy, and what groups of captions change."""

import numpy as np
import pytest
import scipy.stats
import torch

from tvr_lightning.evaluation.ranks import Ranks, count_ranks
from tvr_lightning.evaluation.statistics import (
    bootstrap_interval,
    compare,
    effective_queries,
    percentile_interval,
    recall_values,
    resample,
)


def ranks_of(better: list[int] | torch.Tensor) -> Ranks:
    better = torch.as_tensor(better)
    return Ranks(better, torch.ones_like(better), torch.arange(len(better)))


def two_systems(queries: int = 120, gap: float = 0.6) -> tuple[Ranks, Ranks]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(queries, queries, generator=generator)
    own = torch.eye(queries)
    return tuple(count_ranks(base + strength * own, torch.arange(queries)) for strength in (2.0, 2.0 + gap))


def test_interval_equals_scipys_percentile_bootstrap():
    ranks, _ = two_systems()
    interval = bootstrap_interval(ranks, recall_values(1), resamples=20_000)
    values = recall_values(1)(ranks).numpy()
    expected = scipy.stats.bootstrap(
        (values,), lambda x, axis: x.mean(axis), n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert interval.estimate == pytest.approx(values.mean())
    # One query is 0.83 points, the step of both distributions.
    assert interval.low == pytest.approx(expected.low, abs=0.9)
    assert interval.high == pytest.approx(expected.high, abs=0.9)


def test_a_wider_confidence_gives_a_wider_interval_around_the_figure():
    ranks, _ = two_systems()
    narrow, wide = (bootstrap_interval(ranks, Ranks.expected, confidence=c, resamples=2000) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high


def test_the_interval_of_a_median_equals_scipys():
    values = two_systems()[0].expected()[:41]
    drawn = resample(values, statistic="median", resamples=20_000)
    expected = scipy.stats.bootstrap(
        (values.numpy(),), np.median, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    found = percentile_interval(float(values.median()), drawn)
    assert found.low == pytest.approx(expected.low, abs=1.0)
    assert found.high == pytest.approx(expected.high, abs=1.0)
    even = resample(torch.tensor([1.0, 2.0]), statistic="median", resamples=1000)
    assert even.unique().tolist() == [1.0, 1.5, 2.0]


def test_figures_over_the_same_groups_are_paired_draw_by_draw():
    values, video = torch.rand(30), torch.arange(30) // 3
    both = resample(values, video, resamples=500) + resample(-values, video, resamples=500)
    assert both.abs().max() < 1e-12
    large = torch.rand(4000)  # more draws than are kept
    torch.testing.assert_close(resample(large, resamples=6000)[:5], resample(large, resamples=6000)[:5])


def test_captions_of_a_video_that_agree_are_worth_one_query():
    video = torch.arange(60) // 3
    assert effective_queries(torch.rand(20).repeat_interleave(3), video) == pytest.approx(20)
    generator = torch.Generator().manual_seed(0)
    unrelated = torch.rand(30_000, generator=generator)
    assert effective_queries(unrelated, torch.arange(30_000) // 3) == pytest.approx(30_000, rel=0.05)
    assert effective_queries(torch.rand(60)) == 60
    assert effective_queries(torch.ones(60), video) == 20  # nothing tells them apart


def test_paired_test_equals_scipys_permutation_test():
    first, second = two_systems()
    comparison = compare(first, second, Ranks.expected, resamples=20_000)
    expected = scipy.stats.permutation_test(
        (second.expected().numpy(), first.expected().numpy()),
        lambda x, y, axis: (x - y).mean(axis),
        permutation_type="samples",
        n_resamples=20_000,
        vectorized=True,
        rng=1,
    )
    assert comparison.difference.estimate == pytest.approx(expected.statistic)
    assert comparison.p_value == pytest.approx(expected.pvalue, abs=0.01)


def test_a_system_does_not_differ_from_itself_and_a_clear_gain_is_clear():
    first, second = two_systems(gap=3.0)
    same = compare(first, first, recall_values(1), resamples=1000)
    assert (same.difference.estimate, same.difference.low, same.difference.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    gain = compare(first, second, recall_values(1), resamples=1000)
    assert gain.difference.low > 0
    assert gain.p_value < 0.01


def test_pairing_follows_the_query_and_not_its_position():
    first, second = two_systems()
    shuffled = second[torch.randperm(len(second), generator=torch.Generator().manual_seed(1))]
    assert compare(first, shuffled, Ranks.expected, resamples=200) == compare(
        first, second, Ranks.expected, resamples=200
    )


def test_captions_drawn_by_video_widen_the_interval():
    # Five captions each of 40 videos that rank alike: 40 independent draws, not 200.
    better = torch.randint(0, 20, (40,), generator=torch.Generator().manual_seed(2)).repeat_interleave(5)
    video = torch.arange(40).repeat_interleave(5)
    alone = bootstrap_interval(ranks_of(better), Ranks.expected, resamples=4000)
    together = bootstrap_interval(ranks_of(better), Ranks.expected, group=video, resamples=4000)
    assert together.estimate == pytest.approx(alone.estimate)
    ratio = (together.high - together.low) / (alone.high - alone.low)
    assert ratio == pytest.approx(5**0.5, rel=0.15)
    first, second = ranks_of(better), ranks_of((better - 1).clamp(min=0))
    apart = compare(first, second, Ranks.expected, resamples=500)
    assert compare(first, second, Ranks.expected, group=video, resamples=500).p_value >= apart.p_value


def test_what_cannot_be_resampled_is_refused():
    ranks = ranks_of([0, 1, 2])
    with pytest.raises(ValueError, match="3 and 2 were ranked, 2 of them on both"):
        compare(ranks, ranks[[0, 1]], Ranks.expected)
    with pytest.raises(ValueError, match=r"group must be \(3,\)"):
        bootstrap_interval(ranks, Ranks.expected, group=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="confidence in"):
        bootstrap_interval(ranks, Ranks.expected, confidence=1.0)
    with pytest.raises(ValueError, match="nothing to resample"):
        bootstrap_interval(ranks[[]], Ranks.expected)
