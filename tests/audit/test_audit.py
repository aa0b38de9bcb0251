"""The audit passes honest scores and catches planted leaks, stating the effect on R@1."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
from lightning.pytorch import Trainer, seed_everything

from tvr_lightning.audit.callback import LeakageAudit
from tvr_lightning.audit.experiments import MOVED, audit_scores, normalizer_movement
from tvr_lightning.audit.run import audit_method
from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.data.batch import TextBatch, VideoBatch
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.loop import encode_split
from tvr_lightning.evaluation.normalization import Bank, DualSoftmax, NormalizerChain, QueryBankNorm, SinkhornBias
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.ncl.queue import FeatureQueue
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parents[2] / "recipes"
TEXTS, VIDEOS, DIMENSION = 24, 12, 16
VIDEO_OF_TEXT = torch.arange(TEXTS) % VIDEOS


def features(seed: int = 0) -> tuple[TextFeatures, VideoFeatures]:
    """Two captions per video, only loosely related to it."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randn(VIDEOS, 3, DIMENSION, generator=generator)
    words = torch.randn(TEXTS, 4, DIMENSION, generator=generator)
    words[:, 0] += 0.3 * frames.mean(1)[VIDEO_OF_TEXT]
    text = TextFeatures(words[:, 0], words, torch.ones(TEXTS, 4, dtype=torch.bool))
    return text, VideoFeatures(frames, torch.ones(VIDEOS, 3, dtype=torch.bool))


def cosines(text: TextFeatures, video: VideoFeatures) -> Tensor:
    return normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1), dim=-1).T


def honest(text: TextFeatures, video: VideoFeatures) -> Scores:
    return Scores(cosines(text, video))


def batch_statistics(text: TextFeatures, video: VideoFeatures) -> Scores:
    similarity = cosines(text, video)
    return Scores(similarity - similarity.mean(0, keepdim=True))


def caption_order(text: TextFeatures, video: VideoFeatures) -> Scores:
    return Scores(cosines(text, video) + 0.1 * torch.arange(len(text)).unsqueeze(1).remainder(2))


def lookup_by_pair(text: TextFeatures, video: VideoFeatures) -> Scores:
    """What a code with one caption per video in the videos' order could look up: that places agree."""
    similarity = cosines(text, video)
    places = torch.arange(len(text)).unsqueeze(1) // (len(text) // len(video) or 1)
    return Scores(similarity + 2.0 * (places == torch.arange(len(video))))


def own_caption(text: TextFeatures, video: VideoFeatures, own: TextFeatures) -> Scores:
    return Scores(normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1) + own.sentence, dim=-1).T)


def offset_per_text(text: TextFeatures, video: VideoFeatures) -> Scores:
    """A small leak by batch statistics under offsets of a hundred deviations."""
    leak = 0.3 * cosines(text, video).mean(0, keepdim=True)
    return Scores(cosines(text, video) + leak + 3e3 * text.sentence[:, :1])


def honest_offset_per_text(text: TextFeatures, video: VideoFeatures) -> Scores:
    return Scores(cosines(text, video) + 3e3 * text.sentence[:, :1])


def in_place(text: TextFeatures, video: VideoFeatures) -> Scores:
    text.sentence.div_(text.sentence.norm(dim=-1, keepdim=True))
    return honest(text, video)


@pytest.mark.parametrize("score", [honest, honest_offset_per_text])
def test_honest_scores_pass(score):
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score=score)
    assert not audit.leaks
    assert audit.recall_with_help == pytest.approx(audit.recall_without_help)
    assert (audit.texts, audit.videos) == (TEXTS, VIDEOS)


@pytest.mark.parametrize("leak", [batch_statistics, caption_order, lookup_by_pair, offset_per_text])
def test_planted_leaks_are_caught(leak):
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score=leak)
    assert audit.leaks
    assert max(finding.change for finding in audit.findings) > 0.01


def test_the_effect_of_a_leak_on_recall_is_stated():
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score=lookup_by_pair)
    assert audit.recall_with_help == 100.0
    assert audit.recall_without_help < 60.0
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score_as_released=own_caption)
    assert leaking(audit) == "captions of other videos"
    assert audit.recall_with_help > audit.recall_without_help + 20
    audit = audit_scores(*features(), VIDEO_OF_TEXT, score=in_place)
    assert leaking(audit) == "scoring changes TextFeatures in place"


# Whole methods, on twelve real videos of a test split with one caption each

CHANCE = 100 / 12


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> MSRVTT:
    root: Path = tmp_path_factory.mktemp("audit")
    synthesize("msrvtt", root, 60, 0, workers=1, progress=False)
    return MSRVTT(
        root=str(root), frames=2, words=12, image_size=32, batch_size=8, eval_batch_size=5, num_workers=0, seed=3
    )


@pytest.fixture(scope="module")
def encoder() -> TinyClipEncoder:
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1)


def leaking(audit) -> str:
    return "; ".join(finding.experiment for finding in audit.findings if finding.leaks)


def test_an_honest_method_passes(data, encoder):
    audit = audit_method(CLIP4Clip(encoder, words=12, frames=2), data)
    assert not audit.leaks, leaking(audit)
    assert (audit.texts, audit.videos) == (12, 12)
    assert audit.recall_with_help == pytest.approx(audit.recall_without_help)


class ByPlace(CLIP4Clip):
    """Scores a pair by whether both have the same place in the split."""

    def text_features(self, batch: TextBatch) -> TextFeatures:
        found = super().text_features(batch)
        return dataclasses.replace(found, sentence=one_hot(batch.index % 64, 64).float())

    def video_features(self, batch: VideoBatch) -> VideoFeatures:
        found = super().video_features(batch)
        return dataclasses.replace(found, frames=one_hot(batch.index % 64, 64).float()[:, None].expand_as(found.frames))


class ByArrival(CLIP4Clip):
    """Scores a pair by whether both came as the same item: texts and videos are each encoded from the first on."""

    count = 0

    def test_step(self, batch: TextBatch | VideoBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 0:
            self.count = 0
        super().test_step(batch, batch_idx, dataloader_idx)

    def _places(self, items: int) -> Tensor:
        self.count += items
        return one_hot(torch.arange(self.count - items, self.count) % 64, 64).float()

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        return dataclasses.replace(text, sentence=self._places(len(text)))

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        return dataclasses.replace(video, frames=self._places(len(video))[:, None].expand_as(video.frames))


class OverTheBatch(CLIP4Clip):
    """Takes the mean of the batch from every text."""

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        return dataclasses.replace(text, sentence=text.sentence - text.sentence.mean(0))


def quiet_trainer() -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip


def recall_of_a_test(method, data) -> float:
    """Text-to-video R@1 of a whole evaluation."""
    quiet_trainer().test(method, datamodule=data, verbose=False)
    return method.evaluation.text_to_video["R@1"]


def test_places_in_the_split_are_kept_from_methods_and_a_method_that_reads_them_is_caught(data, encoder):
    method = ByPlace(encoder, words=12, frames=2)
    audit = audit_method(method, data)
    assert "positions in the split given" in leaking(audit)
    assert audit.recall_with_help == 100.0
    assert audit.recall_without_help == pytest.approx(CHANCE)
    assert recall_of_a_test(method, data) == pytest.approx(CHANCE)


def test_the_order_of_arrival_says_nothing_and_a_method_that_reads_it_is_caught(data, encoder):
    method = ByArrival(encoder, words=12, frames=2)
    audit = audit_method(method, data)
    assert "encoded in another order" in leaking(audit)
    assert recall_of_a_test(method, data) < 40


def code_of(pixels: Tensor) -> Tensor:
    """A random vector of 64 numbers for the pixels of a video."""
    return torch.randn(64, generator=torch.Generator().manual_seed(int(pixels.long().sum())))


class AsksTheTrainer(CLIP4Clip):
    """Looks its captions up in the test split, and gives each the code of the video that it describes there."""

    def text_features(self, batch: TextBatch) -> TextFeatures:
        data = self.trainer.datamodule
        split, read = data.load_split("test"), data.video_reader(training=False)
        captions = [text.text for text in split.texts]
        clips = [read(split.videos[split.texts[captions.index(text)].video], None) for text in batch.text]
        codes = torch.stack([code_of(clip.pixels) for clip in clips])
        return dataclasses.replace(super().text_features(batch), sentence=codes)

    def video_features(self, batch: VideoBatch) -> VideoFeatures:
        found = super().video_features(batch)
        codes = torch.stack([code_of(pixels) for pixels in batch.video.pixels])
        return dataclasses.replace(found, frames=codes[:, None].expand_as(found.frames))


class AsksWhileScoring(CLIP4Clip):
    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        self.trainer.test_dataloaders  # noqa: B018  what it does with them is its own affair
        return super().score(text, video)


class Logs(CLIP4Clip):
    """Does what is no leak: reads how the run goes, and logs."""

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        assert self.trainer.precision_plugin.precision == "32-true"
        self.log("step", float(self.global_step + self.trainer.world_size))
        return text.to(self.device)


def test_a_method_that_asks_the_trainer_for_the_ground_truth_is_caught_and_refused(data, encoder):
    method = AsksTheTrainer(encoder, words=12, frames=2)
    audit = audit_method(method, data)
    assert "accesses trainer.datamodule" in leaking(audit)
    assert audit.recall_with_help > 90.0  # codes of two videos may be alike
    assert audit.recall_without_help < 40.0
    with pytest.raises(UserError, match=r"AsksTheTrainer accesses trainer\.datamodule while it encodes or scores"):
        recall_of_a_test(method, data)
    scoring = AsksWhileScoring(encoder, words=12, frames=2)
    assert leaking(audit_method(scoring, data)) == "accesses trainer.test_dataloaders"
    with pytest.raises(UserError, match=r"trainer\.test_dataloaders"):
        recall_of_a_test(scoring, data)


def test_a_method_may_log_and_read_how_the_run_goes(data, encoder):
    method, trainer = Logs(encoder, words=12, frames=2), quiet_trainer()
    assert not audit_method(method, data).leaks
    trainer.test(method, datamodule=data, verbose=False)
    assert trainer.callback_metrics["step/dataloader_idx_0"] == 1.0


class QueueWhileEncoding(CLIP4Clip):
    """Subtracts from every score what the video has with the texts that were encoded so far."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.queue = FeatureQueue(64)

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        self.queue.push(text.without_words())
        return super().encode_text(text)

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        similarity = super().score(text, video).similarity
        if len(self.queue):
            similarity = similarity - super().score(self.queue.records(TextFeatures), video).similarity.mean(0)
        return Scores(similarity)


class RemembersTheLastTexts(CLIP4Clip):
    """Weighs the frames of a video by the texts that were encoded last."""

    last: Tensor | None = None

    def remember(self, text: TextFeatures) -> None:
        self.last = text.sentence.mean(0)

    def remembered(self) -> Tensor | None:
        return self.last

    def encode_text(self, text: TextFeatures) -> TextFeatures:
        self.remember(text)
        return super().encode_text(text)

    def encode_video(self, video: VideoFeatures) -> VideoFeatures:
        last = self.remembered()
        if last is None:
            return super().encode_video(video)
        weight = (20 * normalize(video.frames, dim=-1) @ last).softmax(-1).unsqueeze(-1)
        pooled = (weight * video.frames).sum(1, keepdim=True)
        return dataclasses.replace(video, frames=pooled.expand_as(video.frames))


MEMORY: list[Tensor] = []


class RemembersElsewhere(RemembersTheLastTexts):
    """The same, kept where no attribute of the method leads to."""

    def remember(self, text: TextFeatures) -> None:
        MEMORY[:] = [text.sentence.mean(0)]

    def remembered(self) -> Tensor | None:
        return MEMORY[0] if MEMORY else None


class Counts(CLIP4Clip):
    """Changes plain attributes of itself, of a submodule and of its class while it scores, which changes no score."""

    calls = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = {"texts": [0]}

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        type(self).calls += 1
        self.seen["texts"].append(len(text))
        self.temperature.asked = True
        return super().score(text, video)


class HoldsTheData(CLIP4Clip):
    """Keeps the data module for later."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.for_later = [self.trainer.datamodule]


def test_every_attribute_that_scoring_changes_is_named_and_put_back(data, encoder):
    method = Counts(encoder, words=12, frames=2)
    found = leaking(audit_method(method, data))
    assert found == "scoring changed seen; scoring changed temperature.asked; scoring changed Counts.calls"
    assert (Counts.calls, method.seen, hasattr(method.temperature, "asked")) == (0, {"texts": [0]}, False)


class FitsToTheFirstTexts(CLIP4Clip):
    """Centers texts by the mean of those that it scores first, and keeps the mean."""

    def score(self, text, video):
        if not hasattr(self, "center"):
            self.center = text.sentence.mean(0)
        return super().score(dataclasses.replace(text, sentence=text.sentence - self.center), video)


class SeesEveryBatch(CLIP4Clip):
    def on_test_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.seen = batch


class LooksBehindTheTrainer(CLIP4Clip):
    def score(self, text, video):
        for name in ("_original", "_sealed"):
            getattr(self.trainer, name, None)
        return super().score(text, video)


class BanksTheTest(CLIP4Clip):
    """Takes the bank of a normalization from the test split."""

    def bank(self):
        texts, videos = encode_split(self, self.trainer.datamodule.evaluation_dataloaders("test"))
        return Bank(texts.features, videos.features)


class NormalizesInPlace(CLIP4Clip):
    """Divides the sentences that it was given by their lengths."""

    def score(self, text: TextFeatures, video: VideoFeatures) -> Scores:
        text.sentence.div_(text.sentence.norm(dim=-1, keepdim=True))
        return super().score(text, video)


class BanksTheTraining(BanksTheTest):
    """Takes the bank of a normalization from the training split."""

    def bank(self):
        texts, videos = encode_split(self, self.trainer.datamodule.evaluation_dataloaders("train"))
        return Bank(texts.features, videos.features)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (NormalizesInPlace, ["scoring changes TextFeatures in place"]),
        (BanksTheTraining, ["overrides bank"]),
        (QueueWhileEncoding, [f"encoding changed queue.{name}" for name in ("filled", "position", "stored_sentence")]),
        (RemembersTheLastTexts, ["encoding changed last", "encoded again in smaller batches, VideoFeatures"]),
        (RemembersElsewhere, ["encoded again in smaller batches, VideoFeatures", "half of the videos encoded"]),
        (OverTheBatch, ["encoded again in smaller batches, TextFeatures"]),
        (SeesEveryBatch, ["overrides on_test_batch_start"]),
        (LooksBehindTheTrainer, ["accesses trainer._original; accesses trainer._sealed"]),
        (BanksTheTest, ["12 audited texts in the bank", "12 audited videos in the bank"]),
        (HoldsTheData, ["overrides setup; contains the split's data: for_later"]),
    ],
)
def test_methods_that_leak_are_caught(kind, parts, data, encoder):
    method = kind(encoder, words=12, frames=2)
    found = leaking(audit_method(method, data))
    assert all(part in found for part in parts), found
    assert "scoring changed" not in found
    if kind is QueueWhileEncoding:
        assert not len(method.queue), "the queue is left as it was found"
    if kind is RemembersElsewhere:
        assert "changed" not in found
    if kind in (HoldsTheData, NormalizesInPlace, BanksTheTraining):
        assert [found] == parts


class OwnTwoStage(TwoStage):
    """A user's own normalization, which remembers the candidates of the split to which it was fitted."""


@pytest.mark.parametrize(
    ("kind", "normalization", "found"),
    [
        (FitsToTheFirstTexts, None, ["the evaluation changed center"]),
        (CLIP4Clip, None, []),
        (CLIP4Clip, OwnTwoStage(candidates=4), []),
    ],
)
def test_what_was_fitted_during_a_test_and_kept_is_found_after_it(kind, normalization, found, data, encoder, tmp_path):
    method = kind(encoder, words=12, frames=2, evaluation=EvaluationConfig(normalization=normalization))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(accelerator="cpu", callbacks=[LeakageAudit()], default_root_dir=tmp_path, **quiet).test(method, data)
    assert [leak for leak in method.evaluation.audit.leaks if "evaluation" in leak] == found
    assert method.evaluation.audit.passed == (not found)


def test_ranks_and_predictions_do_not_depend_on_the_order_of_encoding(data, encoder):
    found = []
    for seed in (0, 1):
        method = CLIP4Clip(encoder, words=12, frames=2, evaluation=EvaluationConfig(seed=seed, top_k=12))
        trainer = quiet_trainer()
        again = MSRVTT(**{**data.hparams, "seed": seed})
        trainer.test(method, datamodule=again, verbose=False)
        ranks = method.evaluation.text_to_video_ranks, method.evaluation.video_to_text_ranks
        trainer.predict(method, datamodule=again, return_predictions=False)
        index, scores, videos = method.predictions
        ordered = scores.gather(1, videos.argsort(1))  # similar videos may swap places among the predictions
        found.append([r for rank in ranks for r in (rank.better, rank.tied, rank.index)] + [index, ordered])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class SaysItDoesNot(DualSoftmax):
    """Sees all test queries and says that it does not."""

    transductive = False


class OneWay(SaysItDoesNot):
    """Does so from videos to texts alone."""

    def fit(self, scores, context):
        if context.direction == "video-to-text":
            return super().fit(scores, context)
        return lambda values, rows, columns: values


def audit_of(normalizer, data, encoder):
    config = EvaluationConfig(normalization=normalizer)
    return audit_method(CLIP4Clip(encoder, words=12, frames=2, evaluation=config), data)


@pytest.mark.parametrize(
    ("normalizer", "transductive"),
    [
        (DualSoftmax(2.0), True),
        (QueryBankNorm(2.0, k=2), False),
        (SinkhornBias(0.1), False),
        (SinkhornBias(0.1, queries="oracle"), True),
        (TwoStage(4), False),
        (NormalizerChain([TwoStage(4), DualSoftmax(2.0)]), True),
    ],
)
def test_use_of_the_test_set_by_a_normalizer_is_measured(normalizer, transductive, data, encoder):
    audit = audit_of(normalizer, data, encoder)
    assert not audit.leaks, leaking(audit)
    assert set(audit.transductive.values()) == {transductive} == {normalizer.transductive}


def test_a_normalizer_that_counts_the_captions_of_the_test_set_is_caught():
    normalizer, generator = SinkhornBias(0.1, marginals="count"), torch.Generator().manual_seed(0)
    movement = normalizer_movement(normalizer, honest, features(), VIDEO_OF_TEXT, None, 0.1, generator)
    assert movement["text-to-video"] > 10 * MOVED
    assert movement["video-to-text"] < MOVED


def test_a_normalizer_that_uses_the_test_queries_and_denies_it_is_caught_in_either_direction(data, encoder):
    assert leaking(audit_of(SaysItDoesNot(2.0), data, encoder)).count("half of the queries") == 2
    audit = audit_of(OneWay(2.0), data, encoder)
    assert leaking(audit) == f"half of the queries, video-to-text with {OneWay(2.0).name}"
    assert audit.transductive == {"text-to-video": False, "video-to-text": True}


def recipe_files(data: MSRVTT, folder: Path, *recipes: str) -> list[Path]:
    """Recipes with a tiny encoder for the dataset."""
    overlay = folder / "overlay.yaml"
    overlay.write_text(
        f"data: {{init_args: {{root: '{data.root}', num_workers: 0, frames: 2, words: 12, eval_batch_size: 5}}}}\n"
        "model: {init_args: {encoder: {init_args: {width: 64, image_size: 32, vision_layers: 1}}}}\n"
    )
    return [*(RECIPES / f"{recipe}.yaml" for recipe in (*recipes, "fixture")), overlay]


def test_the_released_protocol_of_gaid_that_leaks_is_caught(data, tmp_path):
    seed_everything(0, verbose=False)
    audit = audit_method(*from_recipe(recipe_files(data, tmp_path, "gaid", "variants/gaid-as-released")))
    assert leaking(audit) == "captions of other videos"


@pytest.mark.filterwarnings("ignore:protocol. as-released scores every video under its own caption")
@pytest.mark.filterwarnings("ignore:.*some scores are below zero")
@pytest.mark.parametrize(
    ("recipes", "options", "sentences", "expected"),
    [
        (
            ["clip4clip"],
            [],
            ["Leakage: none found by the audit on 12 videos"],
            {"passed": True, "videos": 12, "leaks": []},
        ),
        (["clip4clip"], ["--model.init_args.evaluation.audit=0"], ["Leakage: not audited"], None),
        (
            ["tmass", "variants/tmass-as-released"],
            ["--model.init_args.evaluation.normalization=DualSoftmax"],
            [
                "LEAKAGE found by the audit on 12 videos: captions of other videos; their R@1 is",
                "(uses the whole test set, measured)",
            ],
            {"passed": False, "transductive": {"text-to-video": True, "video-to-text": True}},
        ),
    ],
)
def test_the_table_and_the_results_of_a_test_state_its_audit(
    data, tmp_path, capsys, recipes, options, sentences, expected
):
    configs = [f"--config={path}" for path in recipe_files(data, tmp_path, *recipes)]
    quiet = [f"--trainer.{option}" for option in ("accelerator=cpu", "enable_progress_bar=false")]
    assert main(["test", *configs, *quiet, f"--results.directory={tmp_path / 'runs'}", *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(sentence in printed for sentence in sentences)
    (written,) = (tmp_path / "runs").glob("**/results.json")
    audit = json.loads(written.read_text())["audit"]
    assert (audit and {name: audit[name] for name in expected}) == expected


def test_audits_that_are_too_small_or_do_not_end_are_stated(data, encoder):
    with pytest.raises(ValueError, match=r"evaluation\.audit must be at least 4, or 0 for no audit, not 3"):
        EvaluationConfig(audit=3)
    with pytest.raises(UserError, match="did not end within 0 s"):
        audit_method(CLIP4Clip(encoder, words=12, frames=2), data, seconds=0.0)
    result = AuditResult(passed=False, problem="ValueError: too few")
    assert str(result) == "Leakage: not audited, since the audit failed: ValueError: too few"
