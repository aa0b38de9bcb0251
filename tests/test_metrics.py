"""Metrics compared with plain restatements, torchmetrics, and expectations over ties, under torchmetrics' own rules."""

import itertools
import math
import pickle
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from metric_rows import summarize
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG
from torchmetrics.utilities.checks import check_forward_full_state_property
from torchmetrics.wrappers import MetricTracker

from tvr_lightning.errors import UserError
from tvr_lightning.metrics import (
    MRR,
    NDCG,
    MeanRank,
    MedianRank,
    RankMetric,
    RecallSum,
    RetrievalRecall,
    retrieval_metrics,
)
from tvr_lightning.ranks import Ranks, count_ranks, video_to_text_ranks
from tvr_lightning.testing import run_processes
from tvr_lightning.testing.processes import quiet_trainer

BOTH = ("text-to-video", "video-to-text")
MAKERS = [RetrievalRecall, NDCG, MRR, MedianRank, MeanRank, RecallSum]


def scored(texts=23, videos=9, seed=0):
    """Scores (N, M) and the video of each text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(texts, videos, generator=generator), torch.randint(videos, (texts,), generator=generator)


def several(match, videos=9):
    """Booleans (N, M) in which each text also matches the video after its own, and every third text another one."""
    rows, found = torch.arange(len(match)), torch.zeros(len(match), videos, dtype=torch.bool)
    found[rows, match] = found[rows, (match + 1) % videos] = True
    found[rows[::3], (match[::3] + 4) % videos] = True
    return found


def computed(metric, *batches):
    """Value of a metric after some updates."""
    metric.reset()
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


@pytest.mark.parametrize("queries", [1, 2, 31, 32])
def test_metrics_equal_a_plain_restatement(queries):
    scores, match = torch.randn(queries, 50, generator=torch.Generator().manual_seed(queries)), torch.arange(queries)
    columns = scores[:, :queries].T  # the videos that have a text
    for direction, rows in zip(BOTH, (scores, columns), strict=True):
        ranks = [sorted(row, reverse=True).index(row[i]) + 1 for i, row in enumerate(rows.tolist())]
        for k in (1, 5, 50):
            expected = pytest.approx(100 * sum(rank <= k for rank in ranks) / queries)
            assert computed(RetrievalRecall(k, direction), (scores, match)).item() == expected
        assert computed(MedianRank(direction), (scores, match)).item() == statistics.median(ranks)
        assert computed(MeanRank(direction), (scores, match)).item() == pytest.approx(statistics.mean(ranks))


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("k", [1, 3, 20])
def test_metrics_equal_those_of_torchmetrics(direction, k):
    scores, match = scored()
    scores = scores.sigmoid()  # RetrievalMRR finds no item whose score is not positive
    for found in (several(match), one_hot(match, 9).bool()):
        shown, right = (scores, found) if direction == "text-to-video" else (scores.T, found.T)
        shown, right = shown[right.any(1)], right[right.any(1)]  # torchmetrics would count the others as 0
        query = torch.arange(len(shown))[:, None].expand_as(shown)
        for own, other in (
            (RetrievalRecall(k, direction), RetrievalHitRate(top_k=k)),
            (NDCG(k, direction), RetrievalNormalizedDCG(top_k=k)),
            (MRR(direction), RetrievalMRR()),
        ):
            expected = pytest.approx(100 * other(shown, right, query).item(), rel=1e-5)
            assert computed(own, (scores[:7], found[:7]), (scores[7:], found[7:])).item() == expected


@pytest.mark.parametrize("right", [[0], [0, 1], [1, 3, 4], [0, 2, 4, 5]], ids=str)
@pytest.mark.parametrize("scores", [[1.0, 1, 1, 1, 1, 1], [3.0, 2, 2, 2, 2, 1], [2.0, 3, 3, 1, 1, 1]], ids=str)
def test_metrics_are_expectations_over_the_order_of_ties(scores, right):
    places = [
        sorted(order.index(item) + 1 for item in right)
        for order in itertools.permutations(range(6))
        if all(scores[first] >= scores[second] for first, second in itertools.pairwise(order))
    ]

    def expected(value):
        return pytest.approx(statistics.mean(map(value, places)))

    def gain(ranks, k):
        return sum(1 / math.log2(1 + rank) for rank in ranks if rank <= k)

    batch = torch.tensor([scores]), torch.zeros(1, 6, dtype=torch.bool)
    batch[1][0, right] = True
    for k in range(1, 7):
        assert computed(RetrievalRecall(k), batch).item() == expected(lambda ranks, k=k: 100.0 * (ranks[0] <= k))
        best = gain(range(1, len(right) + 1), k)
        assert computed(NDCG(k), batch).item() == expected(lambda ranks, k=k, best=best: 100 * gain(ranks, k) / best)
    assert computed(MRR(), batch).item() == expected(lambda ranks: 100 / ranks[0])
    assert computed(MeanRank(), batch).item() == expected(lambda ranks: ranks[0])
    assert computed(MRR("video-to-text"), (batch[0].T, batch[1].T)) == computed(MRR(), batch)


def test_a_video_is_represented_by_its_best_text_unless_several_match():
    scores, match = scored()
    ranks = video_to_text_ranks(scores, match)
    assert computed(MeanRank("video-to-text"), (scores, match)) == ranks.expected().mean()
    single = computed(MeanRank("video-to-text"), (scores, one_hot(match, 9).bool()))
    own = [(scores[:, video] > scores[match == video, video].max()).sum() for video in match.unique()]
    assert single == 1 + statistics.mean(map(int, own))


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("make", MAKERS)
def test_torchmetrics_rules_hold(make, direction, capsys):
    scores, match = scored()
    for right in (match, several(match)):
        expected = computed(make(direction=direction), (scores, right))
        metric = make(direction=direction)
        assert metric(scores[:10], right[:10]) == computed(make(direction=direction), (scores[:10], right[:10]))
        metric(scores[10:], right[10:])
        assert metric.compute().item() == pytest.approx(expected.item())
        copies = [metric.clone(), pickle.loads(pickle.dumps(metric)), make(direction=direction)]
        metric.persistent(True)
        copies[2].load_state_dict(metric.state_dict())
        with pytest.warns(UserWarning, match="before the ``update``"):
            assert [copy.compute() for copy in copies] == [metric.compute()] * 3
        first, second = make(direction=direction), make(direction=direction)
        for part, rows in ((first, slice(0, 4)), (first, slice(4, 4)), (second, slice(4, 23))):
            part.update(scores[rows], right[rows])
        first.merge_state(second)
        assert first.compute().item() == pytest.approx(expected.item())
        metric.reset()
        with pytest.warns(UserWarning, match="before the ``update``"):
            assert metric.compute().isnan()
    assert make.is_differentiable is make.full_state_update is False
    inputs = {"similarity": scores, "match": match}
    check_forward_full_state_property(make, {"direction": direction}, inputs, num_update_to_compare=[3], reps=2)
    assert "Full state for 3 steps" in capsys.readouterr().out  # printed if both settings give the same results


def test_trackers_know_which_values_are_better():
    scores, match = scored(videos=60)
    for make in MAKERS:
        tracker, improved = MetricTracker(make()), scores.clone()
        for _ in range(2):
            tracker.increment()
            tracker.update(improved, match)
            improved[torch.arange(23), match] += 0.5
        assert tracker.best_metric(return_step=True) == (tracker.compute(), 1)
    names, tracker = [*retrieval_metrics()], MetricTracker(retrieval_metrics())
    lower = [name for name, more in zip(names, tracker.maximize, strict=True) if not more]
    assert lower == ["t2v_MdR", "t2v_MnR", "v2t_MdR", "v2t_MnR"]


def test_a_collection_has_both_directions_and_one_copy_of_the_scores():
    scores, match = scored()
    metrics = retrieval_metrics((1, 4))
    for start in range(0, 23, 5):
        metrics.update(scores[start : start + 5], match[start : start + 5])
    assert sorted(map(len, metrics.compute_groups.values())) == [5, 6]
    states = [metric.similarity for name, metric in metrics.items(copy_state=False) if not name.startswith("t2v")]
    assert len(states) == 6
    assert all(state is states[0] for state in states)
    texts, videos = summarize(count_ranks(scores, match), (1, 4)), summarize(video_to_text_ranks(scores, match), (1, 4))
    expected = {f"t2v_{name}": value for name, value in texts.items()}
    expected |= {f"v2t_{name}": value for name, value in videos.items()}
    expected["SumR"] = texts["RSum"] + videos["RSum"]
    assert metrics.compute() == expected
    assert list(metrics.compute()) == list(expected)
    assert texts["RSum"] == pytest.approx(texts["R@1"] + texts["R@4"])
    assert metrics.clone(prefix="val/")(scores, match) == {f"val/{name}": value for name, value in expected.items()}
    own = MetricCollection([RetrievalRecall(4), MedianRank()])
    assert own(scores, match) == {"RetrievalRecall": texts["R@4"], "MedianRank": texts["MdR"]}


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_counts_equal_plain_loops_with_many_ties(data):
    queries, gallery = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    row = st.lists(st.integers(-2, 2), min_size=gallery, max_size=gallery)
    scores = data.draw(st.lists(row, min_size=queries, max_size=queries))
    match = data.draw(st.lists(st.integers(0, gallery - 1), min_size=queries, max_size=queries))
    ranks = count_ranks(torch.tensor(scores, dtype=torch.float32), torch.tensor(match))
    pairs = list(zip(scores, match, strict=True))
    assert ranks.better.tolist() == [sum(score > row[own] for score in row) for row, own in pairs]
    assert ranks.tied.tolist() == [sum(score == row[own] for score in row) for row, own in pairs]


def test_a_video_ranks_by_its_best_caption_among_the_best_of_others():
    # Videos 0 and 2 have two captions, video 1 has none, video 3 has one.
    video_of_text = torch.tensor([0, 2, 0, 3, 2])
    similarity = torch.tensor([
        [0.2, 0.9, 0.1, 0.3],
        [0.5, 0.9, 0.3, 0.9],
        [0.4, 0.9, 0.8, 0.2],
        [0.1, 0.9, 0.2, 0.9],
        [0.6, 0.9, 0.2, 0.1],
    ])  # fmt: skip
    ranks = video_to_text_ranks(similarity, video_of_text)
    assert ranks.index.tolist() == [0, 2, 3]
    # 0: own best .4, video 2's best .6, video 3's .1; 2: own .3, video 0's .8; 3: own .9, video 2's .9 ties.
    assert ranks.better.tolist() == [1, 1, 0]
    assert ranks.tied.tolist() == [1, 1, 2]


class Evaluated(LightningModule):
    """A module of another project, which logs the metrics as torchmetrics' documentation shows."""

    def __init__(self):
        super().__init__()
        self.metrics = retrieval_metrics()

    def validation_step(self, batch, batch_idx):
        self.metrics.update(*batch)
        self.log_dict(self.metrics)


def test_a_plain_module_logs_the_metrics():
    scores, match = scored()
    module, trainer = Evaluated(), quiet_trainer()
    loader = DataLoader([*zip(scores, match, strict=True)], batch_size=4)
    for _ in range(2):  # Lightning resets the metrics
        (found,) = trainer.validate(module, loader, verbose=False)
        assert found == retrieval_metrics()(scores, match)


SHARES = {"uneven": [4, 19], "one empty": [23, 0], "one without updates": [None, 23]}


def metrics_of_a_process(rank, kinds):
    return [metrics_of_shares(rank, right) for right in kinds]


def metrics_of_shares(rank, right):
    """All values for every share of the texts, and NaN if no process has any."""
    scores, found = scored()[0], {}
    metrics = retrieval_metrics()
    for name, counts in SHARES.items():
        start = sum(count or 0 for count in counts[:rank])
        if counts[rank] is not None:
            rows = slice(start, start + counts[rank])
            metrics.update(scores[rows][:2], right[rows][:2])
            metrics.update(scores[rows][2:], right[rows][2:])
        found[name] = {key: value.item() for key, value in metrics.compute().items()}
        metrics.reset()
    found["none"] = {key: value.item() for key, value in metrics.compute().items()}
    return found


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_two_processes_with_unequal_and_empty_batches_compute_what_one_does():
    scores, match = scored()
    kinds = (match, several(match))
    for processes in zip(*run_processes(metrics_of_a_process, 2, kinds), kinds, strict=True):
        *both, right = processes
        expected = {key: value.item() for key, value in retrieval_metrics()(scores, right).items()}
        nothing = dict.fromkeys(expected, pytest.approx(math.nan, nan_ok=True))
        assert both == [dict.fromkeys(SHARES, expected) | {"none": nothing}] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, m: (s[0], m), r"similarity is torch.float32 of shape \(9,\). Pass a floating-point matrix"),
        (lambda s, m: (s.long(), m), "similarity is torch.int64 of shape"),
        (
            lambda s, m: (s, m[1:]),
            r"match is torch.int64 of shape \(22,\), but similarity has shape \(23, 9\). Pass the",
        ),
        (lambda s, m: (s.T, m), r"match is torch.int64 of shape \(23,\), but similarity has shape \(9, 23\). Pass the"),
        (lambda s, m: (s, m.float()), "match is torch.float32 of shape"),
        (lambda s, m: (s, several(m).T), r"match is torch.bool of shape \(9, 23\)"),
        (lambda s, m: (s, m + 1), "match contains 9, but similarity has only the columns 0 to 8"),
        (lambda s, m: (s, m - 9), "match contains -"),
        (lambda s, m: (s / 0, m), "1 of 207 scores are NaN, in 1 rows and 1 columns; .* text 2 against video 3"),
    ],
)
def test_inputs_that_cannot_be_ranked_are_refused(change, message):
    scores, match = scored()
    scores[2, 3] = 0.0
    for direction in BOTH:
        with pytest.raises(UserError, match=message):
            MeanRank(direction).update(*change(scores, match))


def test_rows_of_another_gallery_are_refused():
    metric = MeanRank("video-to-text")
    metric.update(torch.rand(3, 5), torch.arange(3))
    with pytest.raises(UserError, match=r"has 3 columns, but that of earlier texts has 5\. Pass the scores"):
        metric.update(torch.rand(3, 3), torch.arange(3))


def test_arguments_out_of_range_are_refused():
    for metric, k in ((NDCG, 0), (RetrievalRecall, 0), (RetrievalRecall, -5)):
        with pytest.raises(UserError, match=f"{metric.__name__}.k is {k}; expected"):
            metric(k)
    with pytest.raises(UserError, match=r"MRR\.direction is 't2v'; expected text-to-video or video-to-text"):
        MRR("t2v")


class WorstRank(RankMetric):
    """A metric as users write it."""

    higher_is_better = False

    def value(self, ranks: Ranks) -> torch.Tensor:
        return ranks.expected().max()


def test_a_user_defined_metric_needs_only_a_value():
    scores, match = scored()
    assert computed(WorstRank(), (scores, match)) == count_ranks(scores, match).expected().max()
    assert computed(WorstRank("video-to-text"), (scores, match)) == video_to_text_ranks(scores, match).expected().max()
    assert computed(WorstRank(), (scores.half(), match.int())) == count_ranks(scores.half(), match).expected().max()
    assert computed(WorstRank(compute_on_cpu=True), (scores, match)) == computed(WorstRank(), (scores, match))


def test_the_example_of_the_page_runs(capsys):
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
    example = page.partition("## Metrics")[2].partition("```python\n")[2].partition("```")[0]
    assert len([line for line in example.splitlines() if line]) == 5
    exec(example, {})
    assert capsys.readouterr().out.startswith("{'t2v_R@1': tensor(")
