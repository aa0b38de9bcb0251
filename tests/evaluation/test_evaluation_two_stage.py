"""Two-stage retrieval: candidates first, in the order of the method, then the rest.

Reranking candidates by captions and video files: ranks, costs, resuming, and neutral names.
"""

import importlib
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from metric_rows import text_features
from search_parts import write_clip
from tiny_transformers import save_tiny_reranker
from torch.nn.functional import cosine_similarity, normalize

from tvr_lightning.audit.run import audit_method
from tvr_lightning.data import MSRVTT
from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.records import Split, TextRecord, VideoRecord
from tvr_lightning.encoders import MissingWeightsError, TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.evaluator import Evaluator
from tvr_lightning.evaluation.normalization import Context, normalize_scores
from tvr_lightning.evaluation.pair_scores import PairScores
from tvr_lightning.evaluation.reranker import CrossEncoderReranker, FunctionReranker
from tvr_lightning.evaluation.sources import TransposedSource, streamed_ranks
from tvr_lightning.evaluation.two_stage import TwoStage, UnscoredPairs, nearest
from tvr_lightning.features import Scores, VideoFeatures
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.metrics import direction_metrics
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.checkpoints import named_code

CLIPS, K = 6, 3
OWNER = torch.tensor([2, 0, 4, 2, 1, 0, 5, 3])
CAPTIONS = [f"caption {number}" for number in range(len(OWNER))]


def second_stage(text, video):
    """A score that disagrees with the first stage."""
    return Scores((text.sentence.sin() @ video.frames.cos().mean(1).T).tanh())


def uneven_split(seed=0):
    """Five videos with 2, 1, 3, 0 and 2 texts, the texts in another order."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.tensor([2, 0, 4, 2, 1, 0, 4, 2])
    frames = torch.randn(5, 4, 6, generator=generator)
    sentence = frames.mean(1)[owner] + torch.randn(8, 6, generator=generator)
    mask = torch.arange(4) < torch.tensor([[4], [2], [1], [3], [4]])
    return text_features(sentence), VideoFeatures(frames, mask), GroundTruth(owner, 5, "Toy", "test", "all captions")


def evaluate_stages(normalizer, seed=0, **options):
    text, video, truth = uneven_split(seed)
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
    text, video, truth = uneven_split(seed)
    evaluation = evaluate_stages(TwoStage(count), seed, **options)
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
    text, video, truth = uneven_split()
    nan = Evaluator(lambda texts, videos: Scores(second_stage(texts, videos).similarity * float("nan")))
    with pytest.raises(ValueError, match="16 of 16 candidates' scores are NaN"):
        nan.evaluate(text, torch.arange(8), video, torch.arange(5), truth, TwoStage(2))
    with pytest.raises(ValueError, match="needs the features of texts and videos"):
        normalize_scores(TwoStage(2), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"TwoStage\.candidates is 0"):
        TwoStage(0)


def test_as_many_candidates_as_items_give_the_results_of_the_method():
    plain, two = evaluate_stages(None), evaluate_stages(TwoStage(100))
    assert two.text_to_video == plain.text_to_video
    assert two.video_to_text == plain.video_to_text
    assert set(two.measured.values()) == {100.0}
    assert plain.measured == {}
    assert (two.post_processing, two.transductive) == ("two stages (100 candidates)", False)


def test_masked_frames_do_not_change_the_first_stage():
    _, video, _ = uneven_split()
    noisy = VideoFeatures(torch.where(video.frame_mask[..., None], video.frames, 99.0), video.frame_mask)
    masked = TwoStage(2, mask_frames=True)
    torch.testing.assert_close(masked.video_vectors(noisy), masked.video_vectors(video))
    assert not torch.allclose(TwoStage(2).video_vectors(noisy), TwoStage(2).video_vectors(video))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [write_clip(folder / f"video{number}.mp4", number) for number in range(CLIPS)]


@pytest.fixture
def split(clips):
    videos = [VideoRecord(clip.stem, clip) for clip in clips]
    texts = [TextRecord(caption, video) for caption, video in zip(CAPTIONS, OWNER.tolist(), strict=True)]
    return Split("test", "toy", videos, texts)


def features():
    generator = torch.Generator().manual_seed(0)
    frames = torch.randn(CLIPS, 2, 6, generator=generator)
    sentence = frames.mean(1)[OWNER] + 2.5 * torch.randn(len(OWNER), 6, generator=generator)
    return text_features(sentence), VideoFeatures(frames, torch.ones(CLIPS, 2, dtype=torch.bool))


def evaluate(split, reranker, tmp_path, count=K, seed=0):
    truth = GroundTruth(OWNER, CLIPS, "Toy", "test", "all captions", items=split)
    text, video = features()
    never = Evaluator(lambda text, video: pytest.fail("the method's score was used"), seed=seed)
    stages = TwoStage(count, reranker=reranker, scores_folder=str(tmp_path / "scores"))
    return never.evaluate(text, torch.arange(len(OWNER)), video, torch.arange(CLIPS), truth, stages)


class Oracle:
    """Knows the answers: the content of the file that each caption describes. Records what it is given."""

    def __init__(self, clips, stop_after=None):
        content = [clip.read_bytes() for clip in clips]
        self.answers = {caption: content[video] for caption, video in zip(CAPTIONS, OWNER.tolist(), strict=True)}
        self.calls, self.stop_after = [], stop_after

    def __call__(self, caption, video):
        if len(self.calls) == self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((caption, video))
        return float(self.answers[caption] == video.read_bytes())


def first_stage(count):
    text, video = features()
    similarity = cosine_similarity(text.sentence[:, None], video.frames.mean(1), dim=-1)
    return similarity, [similarity.topk(count).indices, similarity.T.topk(count).indices]


def test_answers_lift_recall_to_that_of_the_candidates_and_each_pair_is_scored_once(split, clips, tmp_path):
    oracle = Oracle(clips)
    found = evaluate(split, FunctionReranker(oracle), tmp_path)
    similarity, (of_texts, of_videos) = first_stage(K)
    held = (of_texts == OWNER[:, None]).any(1)
    assert 0.3 < float(held.double().mean()) < 1
    measured = found.measured
    assert found.text_to_video["R@1"] == measured[f"recall of the {K} candidates, text-to-video"]
    assert found.video_to_text["R@1"] == measured[f"recall of the {K} candidates, video-to-text"]
    assert found.text_to_video["R@1"] == pytest.approx(100 * held.double().mean())
    before = 100 * (similarity.argmax(1) == OWNER).double().mean()
    assert measured["R@1 before reranking, text-to-video"] == pytest.approx(before)
    # The others keep the order of the first stage.
    rank = (similarity > similarity.gather(1, OWNER[:, None])).sum(1)
    assert torch.equal(found.text_to_video_ranks.better, torch.where(held, 0, rank))
    pairs = {(text, int(video)) for text, row in enumerate(of_texts) for video in row}
    pairs |= {(int(text), video) for video, row in enumerate(of_videos) for text in row}
    assert len(oracle.calls) == len(pairs) == measured["reranked pairs (number)"]
    assert found.post_processing == f"two stages ({K} candidates reranked by {__name__}.Oracle)"
    # Names reveal nothing, and all captions of a video are scored together.
    files = [video for _, video in oracle.calls]
    assert not [file for file in files if "video" in file.name]
    assert len(dict.fromkeys(files)) == CLIPS + 1  # the first pair is timed alone
    assert [files[0], *(b for a, b in itertools.pairwise(files) if a != b)] == list(dict.fromkeys(files))
    order = list(dict.fromkeys(caption for caption, _ in oracle.calls))
    other = Oracle(clips)
    evaluate(split, FunctionReranker(other), tmp_path / "other", seed=1)
    assert order != list(dict.fromkeys(caption for caption, _ in other.calls))


def test_a_stopped_run_resumes_and_changed_files_are_scored_again(split, clips, tmp_path):
    stopped = Oracle(clips, stop_after=9)
    with pytest.raises(KeyboardInterrupt):
        evaluate(split, FunctionReranker(stopped), tmp_path)
    resumed, whole = Oracle(clips), Oracle(clips)
    found = evaluate(split, FunctionReranker(resumed), tmp_path)
    expected = evaluate(split, FunctionReranker(whole), tmp_path / "other")
    assert torch.equal(found.text_to_video_ranks.better, expected.text_to_video_ranks.better)
    (journal,) = (tmp_path / "scores").glob("*.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    assert sum(len(line["scores"]) for line in lines) == len(whole.calls)
    assert len(whole.calls) - 9 <= len(resumed.calls) < len(whole.calls)
    again = Oracle(clips)
    assert evaluate(split, FunctionReranker(again), tmp_path).measured["reranked pairs (number)"] == len(whole.calls)
    assert again.calls == []
    copy = Path(shutil.copy(clips[0], tmp_path / "video0.mp4"))
    split.videos[0] = VideoRecord("video0", copy)
    evaluate(split, FunctionReranker(again), tmp_path)
    assert {video.suffix for _, video in again.calls} == {".mp4"}
    assert 0 < len(again.calls) < len(whole.calls)


def test_the_first_pair_gives_an_estimate_of_the_time(split, tmp_path, caplog):
    caplog.set_level("INFO")
    shown = []

    def score(caption, video):
        shown.append("takes at most about 0:0" in caplog.text)
        return 0.0

    evaluate(split, FunctionReranker(score), tmp_path)
    assert shown == [False] + [True] * (len(shown) - 1)


def test_an_edited_function_scores_again(split, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for sign in ("", "-"):
        code = f"def score(caption, video):\n    return {sign}float(sum(map(ord, caption)))\n"
        (tmp_path / "edited_reranker.py").write_text(code)
        monkeypatch.delitem(sys.modules, "edited_reranker", raising=False)
        importlib.invalidate_caches()
        found.append(evaluate(split, FunctionReranker("edited_reranker.score"), tmp_path).video_to_text_ranks.better)
    assert not torch.equal(*found)
    for sign in (1.0, -1.0):
        own = FunctionReranker(lambda caption, video, sign=sign: sign * sum(map(ord, caption)))
        found.append(evaluate(split, own, tmp_path).video_to_text_ranks.better)
    assert not torch.equal(*found[2:])


def test_scores_that_are_not_numbers_and_files_that_cannot_be_reranked_are_refused(split, clips, tmp_path):
    with pytest.raises(UserError, match="expected one number"):
        evaluate(split, FunctionReranker(lambda caption, video: float("nan")), tmp_path)
    oracle = FunctionReranker(Oracle(clips))
    with pytest.raises(UserError, match="needs captions and video files"):
        evaluate(None, oracle, tmp_path)
    split.videos[1] = VideoRecord("video1", clips[1], (0.0, 1.0))
    with pytest.raises(UserError, match="scores whole files"):
        evaluate(split, oracle, tmp_path)
    split.videos[1] = VideoRecord("video1", tmp_path / "absent.mp4")
    with pytest.raises(UserError, match=r"missing, such as .*absent\.mp4"):
        evaluate(split, oracle, tmp_path)
    with pytest.raises(UserError, match="nowhere cannot be imported"):
        FunctionReranker("no_module.nowhere")
    with pytest.raises(UserError, match="is not a function"):
        FunctionReranker("os.path")
    for borrowed in ("tvr_lightning.files.replace_whole", "pickle.dumps"):
        with pytest.raises(UserError, match="not defined there"):
            FunctionReranker(borrowed)
    # Checkpoints cannot run a function without trust.
    assert (
        list(named_code({"class_path": "tvr_lightning.FunctionReranker", "init_args": {"function": "os.system"}}))[1]
        == "os"
    )


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    pytest.importorskip("sentence_transformers")
    return save_tiny_reranker(tmp_path_factory.mktemp("model"))


def test_a_cross_encoder_sees_the_frames_and_the_caption(reranker, clips):
    captions = ["a red star moves left", "blue circle"]
    found = CrossEncoderReranker(str(reranker), frames=4)
    scores = torch.tensor([found.checked(captions, clip) for clip in clips])
    assert scores.shape == (CLIPS, 2)
    assert scores.std(0).min() > 1e-3
    assert (scores[:, 0] - scores[:, 1]).abs().min() > 1e-4
    batched = CrossEncoderReranker(str(reranker), frames=4, batch_size=2)
    torch.testing.assert_close(torch.tensor(batched.checked(captions, clips[0])), scores[0], rtol=1e-4, atol=1e-5)
    part = found.checked(captions, clips[0], (1.0, 3.0))
    assert abs(part[0] - float(scores[0, 0])) > 1e-4
    assert found.settings() != batched.settings() or batched.batch_size == 2
    assert CrossEncoderReranker(str(reranker), frames=6).settings() != found.settings()
    before = found.settings()
    (reranker / "template.jinja").write_text("{{ messages }}")
    assert found.settings() != before


def test_models_that_cannot_rerank_videos_are_refused_before_they_are_loaded(reranker, tmp_path):
    with pytest.raises(MissingWeightsError, match="the reranker no/model is missing"):
        CrossEncoderReranker("no/model")
    with pytest.raises(UserError, match="is not saved as a CrossEncoder"):
        CrossEncoderReranker(str(reranker.parent / "model"))
    blind = Path(shutil.copytree(reranker, tmp_path / "blind"))
    for config in blind.rglob("*processor_config.json"):
        config.write_text("{}")
    with pytest.raises(UserError, match="does not accept video"):
        CrossEncoderReranker(str(blind))
    foreign = Path(shutil.copytree(reranker, tmp_path / "foreign"))
    modules = json.loads((foreign / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "", "type": "own.Code"})
    (foreign / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=r"runs its own code \(own\.Code\)"):
        CrossEncoderReranker(str(foreign))


def by_name(caption, video):
    """Use the ID of the video, which the link leads to."""
    return len(caption) % 7 + float(sum(video.resolve().stem.encode()) % 5)


def by_content(caption, video):
    return (len(caption) * video.stat().st_size) % 97 / 10


@pytest.mark.parametrize(
    ("function", "leak"), [(by_name, "reranking with copies of the video files"), (by_content, "")]
)
def test_the_audit_accuses_a_reranker_that_uses_ids(function, leak, synthetic, tmp_path):
    sizes = {"frames": 2, "words": 12, "image_size": 32, "batch_size": 8, "eval_batch_size": 5, "num_workers": 0}
    data = MSRVTT(root=str(synthetic("msrvtt", 28)), **sizes)
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1)
    stages = TwoStage(4, reranker=FunctionReranker(function), scores_folder=str(tmp_path))
    method = CLIP4Clip(encoder, words=12, frames=2, evaluation=EvaluationConfig(normalization=stages))
    quiet_trainer().test(method, datamodule=data, verbose=False)
    assert method.evaluation.measured["reranked pairs (number)"] > 4
    found = audit_method(method, data, seed=0)
    assert [finding.experiment for finding in found.findings if finding.leaks] == ([leak] if leak else [])
