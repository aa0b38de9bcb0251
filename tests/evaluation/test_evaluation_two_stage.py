"""Two-stage retrieval: candidates first, in the order of the method, then the rest."""

import pytest
import torch
from metric_rows import text_features
from torch.nn.functional import normalize

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.evaluation.evaluator import Evaluator
from tvr_lightning.evaluation.normalization import Context, normalize_scores
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.sources import TransposedSource, streamed_ranks
from tvr_lightning.evaluation.two_stage import TwoStage, UnscoredPairs, nearest
from tvr_lightning.features import Scores, VideoFeatures
from tvr_lightning.metrics import direction_metrics


def second_stage(text, video):
    """A score that disagrees with the first stage."""
    return Scores((text.sentence.sin() @ video.frames.cos().mean(1).T).tanh())


def split(seed=0):
    """Five videos with 2, 1, 3, 0 and 2 texts, the texts in another order."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.tensor([2, 0, 4, 2, 1, 0, 4, 2])
    frames = torch.randn(5, 4, 6, generator=generator)
    sentence = frames.mean(1)[owner] + torch.randn(8, 6, generator=generator)
    mask = torch.arange(4) < torch.tensor([[4], [2], [1], [3], [4]])
    return text_features(sentence), VideoFeatures(frames, mask), GroundTruth(owner, 5, "Toy", "test", "all captions")


def evaluate(normalizer, seed=0, **options):
    text, video, truth = split(seed)
    evaluator, metrics = Evaluator(second_stage, **options), direction_metrics((1, 2, 3))
    return evaluator.evaluate(text, torch.arange(8), video, torch.arange(5), truth, normalizer, metrics=metrics)


def lists(first, second, count):
    """Ranked lists of rows: the best by `first` in the order of `second`, then the others in the order of `first`."""
    order = first.argsort(1, descending=True)
    ranked = []
    for row, values in zip(order.tolist(), second, strict=True):
        ranked.append(sorted(row[:count], key=lambda item: -float(values[item])) + row[count:])
    return ranked


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"block_texts": 3, "block_videos": 2}])
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_and_recall_equal_those_of_the_two_lists(count, options, seed):
    text, video, truth = split(seed)
    evaluation = evaluate(TwoStage(count), seed, **options)
    owner = truth.video_of_text
    first = normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1), dim=-1).T
    second = second_stage(text, video).similarity
    ranked = lists(first, second, count)
    better = [row.index(own) for row, own in zip(ranked, owner.tolist(), strict=True)]
    assert evaluation.text_to_video_ranks.better.tolist() == better
    held = sum(own in row[:count] for row, own in zip(ranked, owner.tolist(), strict=True))
    assert evaluation.measured[f"recall of the {count} candidates, text-to-video"] == pytest.approx(100 * held / 8)
    described = [0, 1, 2, 4]
    ranked = lists(first.T[described], second.T[described], count)
    places = []
    for video_number, row in zip(described, ranked, strict=True):
        best = min(place for place, item in enumerate(row) if int(owner[item]) == video_number)
        places.append(len({int(owner[item]) for item in row[:best]}))
    assert evaluation.video_to_text_ranks.better.tolist() == places
    held = sum(any(int(owner[i]) == j for i in row[:count]) for j, row in zip(described, ranked, strict=True))
    assert evaluation.measured[f"recall of the {count} candidates, video-to-text"] == pytest.approx(100 * held / 4)


def random_split(texts, videos, seed):
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, videos, (texts,), generator=generator)
    frames = torch.randn(videos, 4, 6, generator=generator)
    sentence = frames.mean(1)[owner] + 0.7 * torch.randn(texts, 6, generator=generator)
    return text_features(sentence), VideoFeatures(frames, torch.ones(videos, 4, dtype=torch.bool)), owner


@pytest.mark.parametrize("block", [2, 1024])
@pytest.mark.parametrize("count", [1, 4, 13, 100])
def test_candidates_have_the_largest_cosines(count, block):
    text, video, _ = random_split(9, 13, 0)
    cosine = normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1), dim=-1).T
    found = nearest(text.sentence, video.frames.mean(1), count, queries_per_block=block)
    assert torch.equal(found, cosine.argsort(1, descending=True)[:, :count])


@pytest.mark.parametrize("count", [1, 3, 20])
def test_scoring_only_the_candidates_gives_the_same_ranks(count):
    text, video, owner = random_split(50, 30, count)
    asked, stages = [], TwoStage(count)

    def counting(texts, videos):
        asked.append(len(texts) * len(videos))
        return second_stage(texts, videos)

    def ranks(source):
        backward = stages.fit(TransposedSource(source), Context("video-to-text"))
        return streamed_ranks(source, owner, stages.fit(source, Context("text-to-video")), backward)

    scored, every = (PairScores(score, text, video, memory_budget_bytes=2**14) for score in (counting, second_stage))
    for found, expected in zip(ranks(UnscoredPairs(scored)), ranks(every), strict=True):
        for field in ("better", "tied", "index"):
            assert torch.equal(getattr(found, field), getattr(expected, field))
    if count < 20:  # with more, several videos are scored at a time
        assert sum(asked) == count * (50 + 30)


def test_nan_scores_a_bare_matrix_and_no_candidates_are_refused():
    text, video, truth = split()
    nan = Evaluator(lambda texts, videos: Scores(second_stage(texts, videos).similarity * float("nan")))
    with pytest.raises(ValueError, match="16 of 16 candidates' scores are NaN"):
        nan.evaluate(text, torch.arange(8), video, torch.arange(5), truth, TwoStage(2))
    with pytest.raises(ValueError, match="needs the features of texts and videos"):
        normalize_scores(TwoStage(2), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"TwoStage\.candidates is 0"):
        TwoStage(0)


def test_as_many_candidates_as_items_give_the_results_of_the_method():
    plain, two = evaluate(None), evaluate(TwoStage(100))
    assert two.text_to_video == plain.text_to_video
    assert two.video_to_text == plain.video_to_text
    assert set(two.measured.values()) == {100.0}
    assert plain.measured == {}
    assert (two.post_processing, two.transductive) == ("two stages (100 candidates)", False)


def test_masked_frames_do_not_change_the_first_stage():
    _, video, _ = split()
    noisy = VideoFeatures(torch.where(video.frame_mask[..., None], video.frames, 99.0), video.frame_mask)
    masked = TwoStage(2, mask_frames=True)
    torch.testing.assert_close(masked.video_vectors(noisy), masked.video_vectors(video))
    assert not torch.allclose(TwoStage(2).video_vectors(noisy), TwoStage(2).video_vectors(video))
