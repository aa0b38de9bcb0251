"""The evaluator compared with ranks of the whole score matrix."""

import subprocess
from functools import partial

import pytest
import torch
from metric_rows import summarize, text_features, video_features
from torch.nn.functional import normalize

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.evaluator import LEAKS, Evaluator
from tvr_lightning.evaluation.external_scores import evaluate_scores
from tvr_lightning.evaluation.normalization import Bank, DualSoftmax, QueryBankNorm, SinkhornBias, normalize_scores
from tvr_lightning.evaluation.results import git_state
from tvr_lightning.evaluation.sources import ProcessShare, complete_matrix
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.metrics import direction_metrics
from tvr_lightning.ranks import text_to_video_ranks, video_to_text_ranks
from tvr_lightning.testing import run_processes
from tvr_lightning.training.distributed import gather_tensor


def cosine(text: TextFeatures, video: VideoFeatures) -> Scores:
    return Scores(normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1), dim=-1).T)


def split(texts_per_video: tuple[int, ...] = (2, 1, 3, 0, 1, 2, 4, 1), noise: float = 1.5, seed: int = 0):
    """Features and pairing of a split whose texts are noisy copies of their videos, in another order."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.repeat_interleave(torch.arange(len(texts_per_video)), torch.tensor(texts_per_video))
    owner = owner[torch.randperm(len(owner), generator=generator)]
    frames = torch.randn(len(texts_per_video), 6, generator=generator)
    sentence = frames[owner] + noise * torch.randn(len(owner), 6, generator=generator)
    truth = GroundTruth(owner, len(texts_per_video), "Toy", "test", "all captions")
    return text_features(sentence), video_features(frames), truth


def evaluate(evaluator: Evaluator, texts, videos, truth, **options):
    return evaluator.evaluate(texts, torch.arange(len(texts)), videos, torch.arange(len(videos)), truth, **options)


def rank_lists(*both):
    return [[ranks.better.tolist(), ranks.tied.tolist(), ranks.index.tolist()] for ranks in both]


def ranks_of(evaluation):
    return rank_lists(evaluation.text_to_video_ranks, evaluation.video_to_text_ranks)


@pytest.mark.parametrize("score", [cosine, lambda t, v: Scores((cosine(t, v).similarity * 4).round())])
def test_ranks_equal_those_of_the_whole_matrix(score):
    texts, videos, truth = split()
    evaluation = evaluate(Evaluator(score), texts, videos, truth)
    matrix = score(texts, videos).similarity
    expected = (text_to_video_ranks(matrix, truth.video_of_text), video_to_text_ranks(matrix, truth.video_of_text))
    assert ranks_of(evaluation) == rank_lists(*expected)
    assert (evaluation.text_to_video, evaluation.video_to_text) == tuple(map(summarize, expected))
    assert evaluation.sum_of_recalls == evaluation.text_to_video["RSum"] + evaluation.video_to_text["RSum"]
    assert (evaluation.texts, evaluation.videos, evaluation.partial) == (14, 8, False)


@pytest.mark.parametrize("normalizer", [None, DualSoftmax(10.0), SinkhornBias(0.1, "oracle")])
@pytest.mark.parametrize("blocks", [(1, 1), (5, 3), (14, 8), (100, 100)])
def test_kept_and_recomputed_scores_give_identical_ranks(blocks, normalizer):
    texts, videos, truth = split()
    calls = {}

    def counting(budget: int, text: TextFeatures, video: VideoFeatures) -> Scores:
        calls[budget] = calls.get(budget, 0) + 1
        return cosine(text, video)

    results = []
    sizes = {"block_texts": blocks[0], "block_videos": blocks[1]}
    for budget in (1, 2**30):
        evaluator = Evaluator(partial(counting, budget), memory_budget_bytes=budget, **sizes)
        results.append(ranks_of(evaluate(evaluator, texts, videos, truth, normalizer=normalizer)))
    assert results[0] == results[1]
    assert calls[1] >= 2 * calls[2**30]


def test_a_small_budget_scores_small_blocks_of_scores_and_features():
    texts, videos, truth = split((3,) * 40)
    scored, read = [], []

    def watched(text: TextFeatures, video: VideoFeatures) -> Scores:
        scored.append(len(text) * len(video))
        read.append(4 * (text.sentence.numel() + text.words.numel()))
        return cosine(text, video)

    plain = evaluate(Evaluator(watched), texts, videos, truth)
    assert max(scored) == 120 * 40
    scored.clear()
    small = evaluate(Evaluator(watched, memory_budget_bytes=2 * 1000 * 288), texts, videos, truth)
    assert max(scored) <= 1000
    assert ranks_of(plain) == ranks_of(small)
    read.clear()
    wide = text_features(torch.randn(300, 256)), video_features(torch.randn(500, 256))
    truth = GroundTruth(torch.arange(300), 500, "X", "test", "one")
    evaluate(Evaluator(watched, memory_budget_bytes=2**19), *wide, truth)
    assert max(read) <= 2**19 // 4


def test_order_and_repetitions_of_the_input_do_not_change_the_ranks():
    texts, videos, truth = split()
    plain = evaluate(Evaluator(cosine), texts, videos, truth)
    text_rows = torch.tensor([*range(13, -1, -1), 3, 0])
    video_rows = torch.tensor([2, 7, 0, 1, 3, 4, 5, 6, 2])
    again = Evaluator(cosine, seed=5).evaluate(texts[text_rows], text_rows, videos[video_rows], video_rows, truth)
    assert ranks_of(plain) == ranks_of(again)
    assert (again.texts, again.videos, again.partial) == (14, 8, False)


def test_position_in_the_batch_reveals_nothing_about_the_match():
    """A method that scores row i against column i highest, regardless of the features, is at chance."""
    nothing, truth = torch.zeros(60, 2), GroundTruth(torch.arange(60), 60, "Toy", "test", "one caption")
    recall = 0.0
    for seed in range(20):
        evaluator = Evaluator(lambda text, video: Scores(torch.eye(len(text), len(video))), seed=seed)
        recall += evaluate(evaluator, text_features(nothing), video_features(nothing), truth).text_to_video["R@1"]
    assert recall / 20 < 5


def test_rounding_between_passes_does_not_make_a_match_its_own_competitor():
    """On some devices the same product comes out differently twice; a single video is still found first."""
    texts, videos, truth = split((5,))
    generator = torch.Generator().manual_seed(0)
    unsteady = Evaluator(
        lambda text, video: Scores(torch.rand(len(text), len(video), generator=generator)), memory_budget_bytes=1
    )
    ranks = evaluate(unsteady, texts, videos, truth).text_to_video_ranks
    assert (ranks.better.tolist(), ranks.tied.tolist()) == ([0] * 5, [1] * 5)


def test_unread_texts_and_videos_make_the_results_partial():
    texts, videos, truth = split()

    def seen(text_rows, video_rows, **options):
        return Evaluator(cosine).evaluate(texts[text_rows], text_rows, videos[video_rows], video_rows, truth, **options)

    # Without video 3, which no text describes, every text still counts, against fewer videos.
    found = seen(torch.arange(14), torch.tensor([0, 1, 2, 4, 5, 6, 7]))
    assert (found.texts, found.videos, found.partial) == (14, 7, True)
    rows, known = torch.arange(4), truth.video_of_text < 4
    found = seen(torch.arange(14), rows)
    expected = text_to_video_ranks(cosine(texts[known], videos[rows]).similarity, truth.video_of_text[known])
    assert (found.texts, found.partial) == (int(known.sum()), True)
    assert found.text_to_video_ranks.index.tolist() == known.nonzero().flatten().tolist()
    assert found.text_to_video_ranks.better.tolist() == expected.better.tolist()
    one = (truth.video_of_text == 0).nonzero()[0]
    found = seen(one, torch.tensor([5]), metrics=direction_metrics((1, 50)))
    assert list(found.text_to_video) == ["R@1", "R@50", "MdR", "MnR", "RSum"]
    assert all(value != value for value in found.video_to_text.values())
    assert found.warnings == ["nothing was ranked: no text was read together with its video"]
    assert found.partial


@pytest.mark.parametrize(
    ("evaluator", "normalizer", "message"),
    [
        (Evaluator(cosine, block_videos=3), None, r"8 of 112 scores are NaN; the first is text 4 against video \d "),
        (Evaluator(lambda t, v: Scores(cosine(t, v).similarity.T)), None, r"must be \(N, M\)"),
        (Evaluator(score_as_released=lambda t, v, o: cosine(t, v)), None, "These have 0 to 4"),
        (Evaluator(cosine), QueryBankNorm(), "needs a bank of training texts and videos, but no bank was given"),
    ],
)
def test_scores_that_cannot_be_ranked_are_refused(evaluator, normalizer, message):
    texts, videos, truth = split()
    texts.sentence[4] = float("nan")
    with pytest.raises(ValueError, match=message):
        evaluate(evaluator, texts, videos, truth, normalizer=normalizer)


def test_half_precision_features_are_scored_in_float32():
    texts, videos, truth = split()
    seen = []

    def watched(text: TextFeatures, video: VideoFeatures) -> Scores:
        seen.append((text.sentence.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return cosine(text, video)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        evaluate(Evaluator(watched), texts.to(torch.bfloat16), videos.to(torch.bfloat16), truth)
    assert set(seen) == {(torch.float32, False, False)}
    seen.clear()
    evaluate(Evaluator(watched), texts.to(torch.float64), videos.to(torch.float64), truth)
    assert {dtype for dtype, _, _ in seen} == {torch.float64}


@pytest.mark.parametrize("captions", [1, 2])
def test_a_released_protocol_receives_the_caption_of_each_video_and_is_marked(captions):
    texts, videos, truth = split((captions,) * 9)
    # A video's score is that of its own caption in the slot of the query's: known only with the pairing.
    pairs = set()

    def leaking(text: TextFeatures, video: VideoFeatures, own: TextFeatures) -> Scores:
        for sentence, frames in zip(own.sentence, video.frames, strict=True):
            text_row, video_row = (texts.sentence == sentence).all(1), (videos.frames == frames).all(2).all(1)
            pairs.add((int(text_row.nonzero()[0]), int(video_row.nonzero()[0])))
        return Scores(normalize(text.sentence, dim=-1) @ normalize(own.sentence, dim=-1).T)

    evaluator = Evaluator(score_as_released=leaking, block_texts=4, block_videos=4)
    evaluation = evaluate(evaluator, texts, videos, truth)
    assert pairs == {(text, int(video)) for text, video in enumerate(truth.video_of_text)}
    assert evaluation.text_to_video["R@1"] == 100.0
    assert evaluation.warnings == [LEAKS]
    assert evaluation.protocol == "all captions, as released"


def banked() -> tuple:
    texts, videos, truth = split()
    bank_texts, bank_videos, _ = split((2,) * 10, seed=9)
    return texts, videos, truth, Bank(bank_texts, bank_videos)


@pytest.mark.parametrize(
    "normalizer",
    [DualSoftmax(5.0), QueryBankNorm(5.0), SinkhornBias(0.2), SinkhornBias(0.2, "oracle", marginals="count")],
    ids=lambda normalizer: normalizer.name,
)
def test_evaluation_normalizes_the_matrix_of_each_direction(normalizer):
    texts, videos, truth, bank = banked()
    evaluator = Evaluator(cosine, block_texts=5, block_videos=3)
    evaluation = evaluate(evaluator, texts, videos, truth, normalizer=normalizer, bank=bank)
    matrix = cosine(texts, videos).similarity
    counts = torch.bincount(truth.video_of_text, minlength=truth.videos).double()
    ones = torch.ones(14, dtype=torch.float64)
    of_texts, of_videos = cosine(bank.texts, videos).similarity, cosine(texts, bank.videos).similarity.T
    if not normalizer.needs_bank:
        of_texts = of_videos = None
    forward = normalize_scores(normalizer, matrix, of_texts, "text-to-video", ones, counts)
    backward = normalize_scores(normalizer, matrix.T, of_videos, "video-to-text", counts, ones).T
    assert evaluation.text_to_video == summarize(text_to_video_ranks(forward, truth.video_of_text))
    assert evaluation.video_to_text == summarize(video_to_text_ranks(backward, truth.video_of_text))
    assert evaluation.post_processing == normalizer.name
    assert evaluation.transductive is normalizer.transductive
    plain = evaluate(Evaluator(cosine), texts, videos, truth)
    assert plain.post_processing is None
    assert evaluation.text_to_video_ranks.better.tolist() != plain.text_to_video_ranks.better.tolist()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("normalizer", [DualSoftmax(), QueryBankNorm()], ids=lambda normalizer: normalizer.name)
def test_a_method_with_logits_gets_the_ranks_of_its_matrix(normalizer, scale):
    texts, videos, truth, bank = banked()

    def score(text: TextFeatures, video: VideoFeatures) -> Scores:
        return Scores(scale * cosine(text, video).similarity)

    of_texts, of_videos = score(bank.texts, videos).similarity, score(texts, bank.videos).similarity
    banks = (of_texts, of_videos) if normalizer.needs_bank else ()
    expected, keys = evaluate_scores(score(texts, videos).similarity, truth, normalizer, (1, 5, 10), *banks)
    evaluator = Evaluator(score, block_texts=5, block_videos=3, measure_balance=True, temperature=scale)
    found = evaluate(evaluator, texts, videos, truth, normalizer=normalizer, bank=bank)
    assert ranks_of(found) == ranks_of(expected)
    assert found.warnings == expected.warnings
    assert any("logits" in warning for warning in found.warnings) == (scale > 1)
    assert set(found.text_to_video_ranks.tied.tolist()) == {1}
    ranked = complete_matrix(keys).argsort(descending=True)
    assert (ranked == truth.video_of_text[:, None]).nonzero()[
        :, 1
    ].tolist() == found.text_to_video_ranks.better.tolist()


SHARDED = {
    "plain": None, "dsl": DualSoftmax(5.0), "qb": QueryBankNorm(5.0), "sinkhorn": SinkhornBias(0.2, "oracle"),
    "two stages": TwoStage(2),
}  # fmt: skip


def evaluate_all(evaluator) -> dict:
    texts, videos, truth, bank = banked()
    found = {}
    for name, normalizer in SHARDED.items():
        evaluation = evaluate(evaluator, texts, videos, truth, normalizer=normalizer, bank=bank)
        found[name] = [ranks_of(evaluation), evaluation.warnings, evaluation.text_to_video, evaluation.video_to_text]
    return found


def evaluate_in_a_process(rank: int, world: int) -> tuple[dict, str]:
    share = ProcessShare(rank, world, lambda tensor: gather_tensor(tensor.unsqueeze(0)))
    evaluator = Evaluator(cosine, block_texts=5, block_videos=3, shard=share)
    found = evaluate_all(evaluator)
    texts, videos, truth = split()
    # Only one block of videos has the NaN, and all processes stop.
    videos.frames[0] = float("nan")
    with pytest.raises(ValueError, match="14 of 112 scores are NaN") as raised:
        evaluate(evaluator, texts, videos, truth)
    return found, str(raised.value)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_give_the_results_of_one(world):
    results = run_processes(evaluate_in_a_process, world, world)
    expected = evaluate_all(Evaluator(cosine, block_texts=5, block_videos=3))
    assert [found for found, _ in results] == [expected] * world
    assert sum("against video 0" in message for _, message in results) == 1
    assert sum("in another process" in message for _, message in results) == world - 1


def test_the_git_state_is_only_that_of_a_repository_that_tracks_the_package(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    installed = tmp_path / "own.py"
    installed.touch()
    assert git_state(installed) is None
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    assert git_state(installed) is None
    git("add", "own.py")
    git("commit", "-m", "second")
    assert git_state(installed)["dirty"] is False
    installed.write_text("changed")
    assert git_state(installed)["dirty"] is True
