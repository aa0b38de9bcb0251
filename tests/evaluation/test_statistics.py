"""Bootstrap intervals and paired tests compared with scipy, and the effect of groups of captions."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from tvr_lightning.evaluation import statistics
from tvr_lightning.evaluation.statistics import (
    detectable_difference,
    effective_queries,
    holm,
    paired_comparison,
    percentile_interval,
    resample,
)
from tvr_lightning.ranks import Ranks, count_ranks


def interval_of(values, group=None, resamples=4000):
    drawn = resample(values, group, resamples=resamples)
    return percentile_interval(float(values.double().mean()), drawn)


def two_systems(queries: int = 120, gap: float = 0.6) -> tuple[Ranks, Ranks]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(queries, queries, generator=generator)
    own = torch.eye(queries)
    return tuple(count_ranks(base + strength * own, torch.arange(queries)) for strength in (2.0, 2.0 + gap))


def scipy_interval(values, statistic):
    return scipy.stats.bootstrap(
        (values.numpy(),), statistic, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval


def test_intervals_of_a_mean_and_a_median_equal_those_of_scipy():
    values = 100.0 * two_systems()[0].found_within(1)
    found = interval_of(values, resamples=20_000)
    expected = scipy_interval(values, lambda x, axis: x.mean(axis))
    assert found.estimate == pytest.approx(values.numpy().mean())
    # One query is 0.83 points, the step of both distributions.
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.9)
    values = two_systems()[0].expected()[:41]
    found = percentile_interval(float(values.median()), resample(values, statistic="median", resamples=20_000))
    expected = scipy_interval(values, np.median)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1.0)
    even = resample(torch.tensor([1.0, 2.0]), statistic="median", resamples=1000)
    assert even.unique().tolist() == [1.0, 1.5, 2.0]


def test_resamples_of_the_same_groups_are_paired(monkeypatch):
    values, video = torch.rand(30), torch.arange(30) // 3
    both = resample(values, video, resamples=500) + resample(-values, video, resamples=500)
    assert both.abs().max() < 1e-12
    monkeypatch.setattr(statistics, "DRAWS", 1000)  # so that these are more draws than are kept
    torch.testing.assert_close(resample(values, resamples=600), resample(values, resamples=600))


def test_captions_of_a_video_that_agree_count_as_one_query():
    video = torch.arange(60) // 3
    assert effective_queries(torch.rand(20).repeat_interleave(3), video) == pytest.approx(20)
    generator = torch.Generator().manual_seed(0)
    unrelated = torch.rand(30_000, generator=generator)
    assert effective_queries(unrelated, torch.arange(30_000) // 3) == pytest.approx(30_000, rel=0.05)
    assert effective_queries(torch.rand(60)) == 60
    assert effective_queries(torch.ones(60), video) == 20  # nothing tells them apart


def test_the_paired_test_equals_the_permutation_test_of_scipy():
    first, second = (ranks.expected() for ranks in two_systems())
    found = paired_comparison(second - first, resamples=20_000)
    expected = scipy.stats.permutation_test(
        (second.numpy(), first.numpy()), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples",
        n_resamples=20_000, vectorized=True, rng=1,
    )  # fmt: skip
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)


def exchanged(difference, group, shift, resamples=20_000):
    """P-value of a shift by random signs of the groups' sums, in NumPy."""
    sums = np.bincount(group, difference - shift)
    signs = np.random.default_rng(1).choice([-1, 1], (resamples, len(sums)))
    return (np.abs(signs @ sums) >= abs(sums.sum()) - 1e-9).mean()


@pytest.mark.parametrize("captions", [1, 4])
def test_an_interval_of_a_difference_contains_the_shifts_that_the_paired_test_keeps(captions):
    first, second = (100.0 * ranks.found_within(5) for ranks in two_systems(gap=0.4))
    difference, video = second - first, torch.arange(120) // captions
    found = paired_comparison(difference, video, resamples=20_000)
    low, high = found.difference.low, found.difference.high
    assert found.difference.estimate == pytest.approx(difference.mean().item())
    for end, inward in ((low, 1), (high, -1)):
        outside, inside = (exchanged(difference.numpy(), video, end + step * inward) for step in (-0.5, 0.5))
        assert outside < 0.055
        assert inside > 0.045
    expected = interval_of(
        difference, video, resamples=20_000
    )  # a bootstrap, which is close for this number of queries
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1.7)


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (5, 0), (6, 0), (0, 5), (0, 6), (8, 1), (9, 1), (3, 11), (3, 13)])
def test_a_difference_is_resolved_exactly_if_its_p_value_is_below_five_percent(wins, losses):
    difference = torch.zeros(300)
    difference[:wins], difference[wins : wins + losses] = 100 / 3, -100 / 3
    found = paired_comparison(difference)
    exact = scipy.stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert found.p_value == pytest.approx(exact, abs=0.008)
    low, high = found.difference.low, found.difference.high
    assert low <= found.difference.estimate <= high
    assert [low > 0 or high < 0, found.p_value < 0.05] == [exact < 0.05] * 2


def test_few_queries_resolve_nothing():
    found = paired_comparison(torch.full((5,), 100.0)).difference
    assert (found.low, found.high) == (float("-inf"), float("inf"))


def test_equal_systems_do_not_differ_and_a_large_gain_is_significant():
    first, second = (100.0 * ranks.found_within(1) for ranks in two_systems(gap=3.0))
    same, gain = paired_comparison(first - first), paired_comparison(second - first)
    ends = same.difference
    assert (ends.estimate, ends.low, ends.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert gain.difference.low > 0
    assert gain.p_value < 0.01
    with pytest.raises(ValueError, match="nothing to resample"):
        paired_comparison(first[:0])


def test_resampling_captions_by_video_widens_the_interval():
    # Five captions each of 40 videos with equal ranks: 40 independent draws, not 200.
    values = torch.randint(1, 21, (40,), generator=torch.Generator().manual_seed(2)).repeat_interleave(5).double()
    video = torch.arange(40).repeat_interleave(5)
    alone, together = interval_of(values), interval_of(values, video)
    assert together.estimate == pytest.approx(alone.estimate)
    ratio = (together.high - together.low) / (alone.high - alone.low)
    assert ratio == pytest.approx(5**0.5, rel=0.15)
    difference = (values - 1).clamp(min=1) - values
    alone, together = (paired_comparison(difference, group, resamples=500) for group in (None, video))
    assert together.p_value >= alone.p_value


def test_holm_follows_its_definition():
    generator = np.random.default_rng(0)
    for count in (1, 2, 7):
        given = generator.random(count) ** 3
        # Rejected at a level if every smaller p-value is, and p is at most the level over the number of tests left.
        levels = np.linspace(0.0005, 0.9995, 1000)
        smallest = np.ones(count)
        for level in levels[::-1]:
            rejected = np.ones(count, dtype=bool)
            for index in np.argsort(given):
                left = count - (given < given[index]).sum()
                if given[index] > level / left:
                    rejected[given >= given[index]] = False
                    break
            smallest[rejected] = level
        assert holm(given) == pytest.approx(smallest, abs=0.002)
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([math.nan, 0.02, 0.5]) == pytest.approx([math.nan, 0.04, 0.5], nan_ok=True)
    assert holm([]) == []


@pytest.mark.parametrize(("groups", "captions"), [(400, 1), (20, 20)])
def test_the_detectable_difference_is_found_as_often_as_its_power_promises(groups, captions):
    generator = np.random.default_rng(0)
    video = torch.arange(groups * captions) // captions

    def test_set(shift):
        common = np.repeat(generator.normal(0, 30, groups), captions)
        return torch.from_numpy(shift + common + generator.normal(0, 60, groups * captions))

    for power in (0.5, 0.8):
        found = [detectable_difference(test_set(0.0), video, power) for _ in range(50)]
        shift = float(np.mean(found))
        tests = [paired_comparison(test_set(shift), video, resamples=1000).p_value < 0.05 for _ in range(400)]
        assert np.mean(tests) == pytest.approx(power, abs=0.06)


def test_the_detectable_difference_of_unrelated_failures_on_a_thousand_queries():
    # 48 % against 48 %, 500 discordant: standard error 100 sqrt(0.5 / 1000) = 2.236.
    difference = torch.zeros(1000)
    difference[:250], difference[250:500] = 100.0, -100.0
    assert detectable_difference(difference) == pytest.approx(2.236 * (1.960 + 0.842), abs=0.02)
    assert detectable_difference(difference, power=0.5) == pytest.approx(2.236 * 1.960, abs=0.02)
    assert detectable_difference(difference[:1]) == math.inf
