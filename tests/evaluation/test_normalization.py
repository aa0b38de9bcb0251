"""Score normalization compared with the released code and the equations of the papers."""

import numpy as np
import pytest
import torch
from metric_rows import in_blocks
from torch.nn.functional import normalize

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.external_scores import SCORE_WARNINGS, evaluate_scores
from tvr_lightning.evaluation.normalization import (
    Context,
    DualSoftmax,
    HalfBank,
    Normalizer,
    QueryBankNorm,
    SinkhornBias,
    normalize_scores,
)
from tvr_lightning.evaluation.sources import AdjustedSource, MatrixSource, best_of_gallery, gallery_logsumexp


def scores(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    texts, videos = torch.randn(rows, 6, generator=generator), torch.randn(columns, 6, generator=generator)
    return (normalize(texts, dim=-1) @ normalize(videos, dim=-1).T).double()


def square(scores: torch.Tensor) -> GroundTruth:
    return GroundTruth(torch.arange(len(scores)), len(scores), "Toy", "test", "pairs")


BELOW_ZERO = "some scores are below zero, and dual softmax can reverse their order"
LOGITS = "the scores look like logits, but the temperature is for cosines"
TIES = "it adds ties to the ranks of {} queries"


def warned(similarity: torch.Tensor, normalizer: Normalizer, **banks: torch.Tensor) -> list[str]:
    evaluation, _ = evaluate_scores(similarity, square(similarity), normalizer, **banks)
    return [warning for warning in evaluation.warnings if warning.partition(":")[0] not in SCORE_WARNINGS]


@pytest.mark.parametrize("lowest", [0.0, -1e-3, -2.0])
def test_dual_softmax_warns_of_negative_scores_once(lowest):
    similarity = scores(9, 9).abs()
    similarity[2, 5] = lowest
    assert warned(similarity, DualSoftmax()) == ([BELOW_ZERO] if lowest else [])


@pytest.mark.parametrize(
    "build", [lambda scale: DualSoftmax(100 / scale), lambda scale: QueryBankNorm(20 / scale),
              lambda scale: SinkhornBias(0.01 * scale, "oracle"), lambda scale: SinkhornBias(0.01 * scale)],
)  # fmt: skip
def test_logits_with_a_temperature_for_cosines_are_reported(build):
    similarity, bank = scores(30, 30).abs(), scores(40, 30, seed=1).abs()
    for scale, temperature, expected in ((1, 1, False), (100, 100, False), (1, 0.1, False), (100, 1, True)):
        normalizer = build(temperature)
        both = {"bank_texts": scale * bank, "bank_videos": scale * bank.T} if normalizer.needs_bank else {}
        assert (LOGITS in warned(scale * similarity, normalizer, **both)) == expected, (scale, temperature)


class Rounded(Normalizer):
    """A normalization that adds ties."""

    name = "rounding"

    def fit(self, scores, context):
        return lambda values, rows, columns: values.round(decimals=1)


def test_ties_that_a_normalization_adds_are_reported():
    similarity = torch.tensor([[0.51, 0.52, 0.1], [0.3, 0.9, 0.3], [0.4, 0.7, 0.7]])
    assert warned(similarity, Rounded()) == [TIES.format(1)]
    assert warned(similarity, DualSoftmax()) == []


def numpy_ranks(normalizer: Normalizer, scores: np.ndarray, bank: np.ndarray) -> list[float]:
    """Ranks of the diagonal with a plain restatement of the formulas in logarithms."""

    def logsumexp(values, axis):
        largest = values.max(axis, keepdims=True)
        return largest + np.log(np.exp(values - largest).sum(axis, keepdims=True))

    scores, bank, negative = scores.astype(np.float64), bank.astype(np.float64), np.zeros(scores.shape, bool)
    if isinstance(normalizer, DualSoftmax):
        scaled, negative = normalizer.temperature * scores, scores < 0
        with np.errstate(divide="ignore"):
            keys = np.log(np.abs(scores)) + scaled - logsumexp(scaled, 0)
    elif isinstance(normalizer, QueryBankNorm):
        keys = normalizer.beta * scores - logsumexp(normalizer.beta * bank, 0)
        chosen = np.isin(scores.argmax(1), bank.argsort(1)[:, -normalizer.k :])
        keys = np.where(chosen[:, None], keys, scores)
    else:
        logits = bank / normalizer.temperature
        columns = -logsumexp(logits, 0)
        for _ in range(normalizer.iterations):
            rows = -logsumexp(logits + columns, 1)
            columns = -logsumexp(logits + rows, 0)
        keys = scores / normalizer.temperature + columns
    own, of_own = keys.diagonal()[:, None], negative.diagonal()[:, None]
    better = (~negative & of_own) | ((negative == of_own) & np.where(negative, keys < own, keys > own))
    return (1 + better.sum(1)).tolist()


@pytest.mark.parametrize("sharpness", [1.0, 1000.0])
@pytest.mark.parametrize("scale", [1.0, 20.0, 100.0, 1000.0])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_ranks_equal_plain_numpy_in_log_space_at_every_scale(precision, scale, sharpness):
    for change in (torch.clone, torch.abs):
        similarity, bank = ((scale * change(scores(40, 40, seed))).to(precision) for seed in (0, 1))
        for normalizer in (
            DualSoftmax(100 * sharpness / scale),
            QueryBankNorm(20 * sharpness / scale, k=2),
            SinkhornBias(0.01 * scale / sharpness),
        ):
            banks = (bank, bank.T) if normalizer.needs_bank else ()
            found, _ = evaluate_scores(similarity, square(similarity), normalizer, (1,), *banks)
            both = similarity.numpy(), bank.numpy()
            assert found.text_to_video_ranks.expected().tolist() == numpy_ranks(normalizer, *both), normalizer.name
            backward = numpy_ranks(normalizer, both[0].T, both[1])
            assert found.video_to_text_ranks.expected().tolist() == backward, normalizer.name


def test_logits_of_a_released_model_are_ranked_in_log_space(test_data):
    similarity = torch.from_numpy(np.load(test_data / "scores" / "clip4clip_msrvtt.npz")["arr_0"])
    for normalizer, bank, expected in (
        (DualSoftmax(), None, {"R@1": 36.5, "R@10": 68.4, "MdR": 3.0, "MnR": 35.4}),
        (QueryBankNorm(), similarity, {"R@10": 68.3, "MdR": 3.0, "MnR": 35.4}),
        (QueryBankNorm(1000.0), similarity - 20.0, {"R@10": 68.4, "MdR": 3.0, "MnR": 35.5}),
    ):
        found, _ = evaluate_scores(similarity, square(similarity), normalizer, bank_texts=bank)
        row = {name: value for name, value in found.text_to_video.items() if name in expected}
        assert row == pytest.approx(expected, abs=0.05)
        assert LOGITS in found.warnings


@pytest.mark.parametrize("blocks", [(1, 1), (4, 5), (100, 3)])
def test_blocks_give_the_same_result_as_the_whole_matrix(blocks):
    similarity, bank = scores(13, 12), scores(20, 12, seed=1)
    source = in_blocks(similarity, *blocks)
    for normalizer in (DualSoftmax(20.0), QueryBankNorm(k=3), SinkhornBias(0.1)):
        adjust = normalizer.fit(source, Context(bank=in_blocks(bank, *blocks)))
        whole = normalize_scores(normalizer, similarity, bank)
        torch.testing.assert_close(adjust(similarity[2:9, 3:8], slice(2, 9), slice(3, 8)), whole[2:9, 3:8])
        values, columns = best_of_gallery(AdjustedSource(source, adjust), 4)
        torch.testing.assert_close(values, whole.topk(4).values)
        assert torch.equal(columns, whole.topk(4).indices)
    for each in (source, MatrixSource(similarity)):
        for k in (1, 3, 20):
            assert torch.equal(best_of_gallery(each, k)[1], similarity.topk(min(k, 12)).indices)
        torch.testing.assert_close(gallery_logsumexp(each, 100.0), (100 * similarity).logsumexp(0))


def test_matrices_are_normalized_and_ranked_in_tiles(monkeypatch):
    similarity, truth = scores(13, 13), square(scores(13, 13))
    whole = normalize_scores(SinkhornBias(0.1, "oracle"), similarity)
    ranks = evaluate_scores(similarity, truth, SinkhornBias(0.1, "oracle"))[0].video_to_text_ranks
    monkeypatch.setattr("tvr_lightning.evaluation.sources.TILE", 30)
    assert [len(block.values) for block in MatrixSource(similarity).blocks()] == [2] * 6 + [1]
    torch.testing.assert_close(normalize_scores(SinkhornBias(0.1, "oracle"), similarity), whole)
    tiled = evaluate_scores(similarity, truth, SinkhornBias(0.1, "oracle"))[0].video_to_text_ranks
    assert tiled.better.tolist() == ranks.better.tolist()


SINKHORN = "Sinkhorn ({}, 4 iterations, {} marginals)"


@pytest.mark.parametrize(
    ("normalizer", "name", "transductive", "needs_bank"),
    [
        (DualSoftmax(), "dual softmax (temperature 100)", True, False),
        (QueryBankNorm(), "QB-Norm (beta 20, k 1)", False, True),
        (SinkhornBias(), SINKHORN.format("train queries, the method's gamma", "uniform"), False, True),
        (SinkhornBias(0.1, "oracle"), SINKHORN.format("oracle queries, gamma 0.1", "uniform"), True, False),
        (SinkhornBias(0.1, marginals="count"), SINKHORN.format("train queries, gamma 0.1", "count"), True, True),
    ],
)
def test_a_normalizer_declares_whether_it_uses_the_test_set_or_a_bank(normalizer, name, transductive, needs_bank):
    assert (normalizer.name, normalizer.transductive, normalizer.needs_bank) == (name, transductive, needs_bank)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DualSoftmax(0.0), "temperature is 0.0"),
        (lambda: QueryBankNorm(k=0), "k is 0"),
        (lambda: SinkhornBias(temperature=0.0), "temperature is 0.0"),
        (lambda: SinkhornBias(iterations=0), "iterations is 0"),
        (lambda: normalize_scores(QueryBankNorm(), scores(3, 3)), "Pass a bank"),
        (lambda: normalize_scores(SinkhornBias(0.01), scores(3, 3)), "Pass a bank"),
        (lambda: normalize_scores(SinkhornBias(queries="oracle"), scores(3, 3)), "needs the temperature"),
        (lambda: normalize_scores(SinkhornBias(0.01, "oracle", marginals="count"), scores(3, 3)), "matches of each"),
    ],
)
def test_bad_options_and_missing_inputs_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("videos", [2, 20])
@pytest.mark.parametrize("direction", ["text-to-video", "video-to-text"])
@pytest.mark.parametrize("normalizer", [DualSoftmax(10.0), QueryBankNorm(), SinkhornBias(0.1)])
def test_each_half_of_the_queries_is_ranked_with_the_other_half_as_bank(normalizer, direction, videos):
    video_of_text = torch.arange(videos).repeat_interleave(2)[torch.randperm(2 * videos)]
    scores = torch.rand(2 * videos, videos, generator=torch.Generator().manual_seed(0))
    scores = scores if direction == "text-to-video" else scores.T
    halves = HalfBank(normalizer, video_of_text, videos)
    half = halves.halves[direction]
    assert half.float().mean() == 0.5
    if direction == "text-to-video":
        assert not set(video_of_text[half].tolist()) & set(video_of_text[~half].tolist()), "captions of one video"
    found = normalize_scores(halves, scores, direction=direction)
    for own in (half, ~half):
        torch.testing.assert_close(found[own], normalize_scores(normalizer, scores[own], scores[~own], direction))


@pytest.mark.parametrize("normalizer", [QueryBankNorm(), SinkhornBias(0.01)], ids=lambda n: n.name)
def test_other_queries_do_not_change_the_result_of_a_normalizer_that_is_not_transductive(normalizer):
    similarity, bank = scores(30, 12), scores(20, 12, seed=1)
    together = normalize_scores(normalizer, similarity, bank)
    for i in range(0, 30, 7):
        torch.testing.assert_close(normalize_scores(normalizer, similarity[[i]], bank)[0], together[i])


def test_dual_softmax_with_a_bank_uses_no_other_test_query():
    scores, bank = torch.rand(5, 4, dtype=torch.float64), torch.rand(7, 4, dtype=torch.float64)
    expected = scores * (3 * scores).exp() / (3 * bank).exp().sum(0)
    torch.testing.assert_close(normalize_scores(DualSoftmax(3.0), scores, bank), expected)
    evaluation, _ = evaluate_scores(
        scores, GroundTruth(torch.arange(4).repeat(2)[:5], 4, "", "test", ""), DualSoftmax(3.0), bank_texts=bank
    )
    assert not evaluation.transductive
    assert evaluation.warnings == ["video-to-text is not normalized: no scores of training videos were given"]
    assert evaluation.post_processing == "dual softmax (temperature 3) with a bank"
