"""Intervals and paired tests compared with scipy, and the effect of groups of captions."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from tvr_lightning.evaluation.statistics import (
    detectable_difference,
    effective_queries,
    holm,
    median_interval,
    paired_comparison,
    proportion_interval,
    wilson_interval,
)
from tvr_lightning.ranks import Ranks, count_ranks


def two_systems(queries: int = 120, gap: float = 0.6) -> tuple[Ranks, Ranks]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(queries, queries, generator=generator)
    own = torch.eye(queries)
    return tuple(count_ranks(base + strength * own, torch.arange(queries)) for strength in (2.0, 2.0 + gap))


def ends(interval):
    return [interval.low, interval.high]


@pytest.mark.parametrize("queries", [1, 7, 200])
def test_the_interval_of_binary_values_is_that_of_wilson(queries):
    for right in {0, 1, queries // 2, queries}:
        found = proportion_interval((torch.arange(queries) < right).double())
        expected = scipy.stats.binomtest(right, queries).proportion_ci(method="wilson")
        assert ends(found) == pytest.approx([expected.low, expected.high])
        assert found.estimate == right / queries


def test_the_interval_of_a_median_is_that_of_order_statistics():
    values = two_systems()[0].expected()
    found = median_interval(values)
    expected = scipy.stats.quantile_test(values.numpy(), q=values.median().item(), p=0.5).confidence_interval()
    assert ends(found) == pytest.approx([expected.low, expected.high], abs=1.0)
    assert found.estimate == np.median(values.numpy())
    video = torch.arange(len(values)).repeat_interleave(5)
    assert ends(median_interval(values.repeat_interleave(5), video)) == pytest.approx(ends(found), abs=0.6)


def test_captions_of_a_video_that_agree_count_as_one_query():
    video = torch.arange(60) // 3
    right = torch.arange(20) < 8
    assert effective_queries(right.repeat_interleave(3), video) == pytest.approx(20)
    assert effective_queries(right) == pytest.approx(20)
    assert ends(proportion_interval(right.repeat_interleave(3), video)) == pytest.approx(wilson_interval(0.4, 20))
    generator = torch.Generator().manual_seed(0)
    unrelated = torch.rand(30_000, generator=generator) < 0.5
    assert effective_queries(unrelated, torch.arange(30_000) // 3) == pytest.approx(30_000, rel=0.05)
    assert effective_queries(torch.ones(60), video) == 20  # nothing shows whether captions agree
    # One of 20 videos differs: its variance counts as much as that of a video whose captions agree.
    one = torch.zeros(60).index_fill_(0, torch.tensor([0]), 1.0)
    share = 1 / 60
    together = ((1 - 3 * share) ** 2 + 19 * (3 * share) ** 2) / (share * (1 - share))
    assert effective_queries(one, video) == pytest.approx(60**2 / ((together + 180) / 2))


@pytest.mark.parametrize("rate", [0.02, 0.48, 0.9])
def test_intervals_of_few_videos_with_many_captions_contain_the_rate(rate):
    generator, group = np.random.default_rng(0), torch.arange(200) // 20
    videos = generator.beta(rate * 7 / 3, (1 - rate) * 7 / 3, (500, 10, 1))  # two captions have a correlation of 0.3
    values = torch.from_numpy((generator.random((500, 10, 20)) < videos).astype(float)).flatten(1)
    found = [proportion_interval(each, group) for each in values]
    assert 0.93 < np.mean([each.low <= rate <= each.high for each in found]) < 0.99


def test_weights_add_the_means_of_two_kinds_of_queries():
    texts, videos = torch.rand(60), torch.rand(20)
    weight = torch.cat([torch.full((60,), 80 / 120), torch.full((20,), 80 / 40)])
    group = torch.cat([torch.arange(60) // 3, torch.arange(20)])
    found = proportion_interval(torch.cat([texts, videos]), group, weight)
    assert found.estimate == pytest.approx((texts.mean() + videos.mean()).item() / 2)
    same = proportion_interval(torch.cat([texts, videos]), group, 7 * weight)
    assert ends(found) == pytest.approx(ends(same))


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
    of_video = difference.reshape(-1, captions).mean(1)
    half = 1.96 * of_video.std().item() / len(of_video) ** 0.5
    assert (low, high) == pytest.approx((found.difference.estimate - half, found.difference.estimate + half), abs=1.7)


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
    assert (same.difference.estimate, *ends(same.difference), same.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert gain.difference.low > 0
    assert gain.p_value < 0.01
    with pytest.raises(ValueError, match="nothing to compare"):
        paired_comparison(first[:0])


def test_holm_is_the_closed_test_of_bonferroni():
    given = np.random.default_rng(0).random(7) ** 3
    sets = [list(some) for count in range(1, 8) for some in itertools.combinations(range(7), count)]
    expected = [max(len(some) * given[some].min() for some in sets if index in some) for index in range(7)]
    assert holm(given) == pytest.approx(np.minimum(expected, 1))
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
    assert detectable_difference(difference[249:251]) < math.inf


@pytest.mark.slow
def test_the_simulations_of_the_page_can_be_repeated(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "interval_coverage.py"
    subprocess.run([sys.executable, script, "--quick", f"--out={tmp_path}"], check=True, capture_output=True)
    rows = [line.split(" | ") for line in (tmp_path / "interval-coverage.md").read_text().splitlines()]
    assert min(float(cell.strip(" |")) for row in rows if "here" in row for cell in row[3:]) > 50
    assert sum(len(row) == 4 for row in rows) >= 3 + 4, "tables of equal systems and of normalization"
