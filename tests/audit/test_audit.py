"""The audit passes honest scores and catches planted leaks, stating the effect on R@1."""

import dataclasses
import functools
import json
import shutil
from typing import ClassVar
from zlib import crc32

import numpy as np
import pytest
import torch
from small_run import small_run
from torch.nn.functional import normalize, one_hot

from tvr_lightning.audit.callback import LeakageAudit
from tvr_lightning.audit.experiments import (
    MOVED,
    audit_scores,
    compare_features,
    compare_scores,
    normalizer_movement,
)
from tvr_lightning.audit.run import audit_method
from tvr_lightning.cli import main
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.readers import MediaReader
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.audit_result import AuditResult
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.loop import encode_split
from tvr_lightning.evaluation.normalization import Bank, DualSoftmax, Normalizer, QueryBankNorm, SinkhornBias
from tvr_lightning.evaluation.two_stage import TwoStage
from tvr_lightning.features import Scores, TextFeatures, VideoFeatures
from tvr_lightning.methods import CLIP4Clip
from tvr_lightning.methods.ncl.queue import FeatureQueue
from tvr_lightning.testing.processes import quiet_trainer

TEXTS, VIDEOS, DIMENSION = 24, 12, 16
VIDEO_OF_TEXT = torch.arange(TEXTS) % VIDEOS
TESTED = 6  # videos of the test split of the synthetic dataset, with one caption each
AUDIT = "--model.init_args.evaluation.audit=64"


def leaking(audit):
    return "; ".join(finding.experiment for finding in audit.findings if finding.leaks)


def features():
    """Random features of two captions per video, which are only loosely related to it."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randn(VIDEOS, 3, DIMENSION, generator=generator)
    words = torch.randn(TEXTS, 4, DIMENSION, generator=generator)
    words[:, 0] += 0.3 * frames.mean(1)[VIDEO_OF_TEXT]
    text = TextFeatures(words[:, 0], words, torch.ones(TEXTS, 4, dtype=torch.bool))
    return text, VideoFeatures(frames, torch.ones(VIDEOS, 3, dtype=torch.bool))


def cosines(text, video):
    return normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1), dim=-1).T


def plain(text, video):
    return Scores(cosines(text, video))


def honest(text, video):
    """Cosines with an offset of a hundred deviations per text, which changes no rank among the videos of a text."""
    return Scores(cosines(text, video) + 3e3 * text.sentence[:, :1])


def batch_statistics(text, video):
    """Add a small leak that the offsets must not hide."""
    return Scores(honest(text, video).similarity + 0.3 * cosines(text, video).mean(0, keepdim=True))


def nearly_equal(text, video, leak=0.0):
    """Scores of a hardly trained method, whose last digit depends on the size of the block, as in matrix products."""
    scores = cosines(text, video)
    rounded = len(text) % 4 * torch.finfo(torch.float32).eps
    return Scores(1 + 1e-4 * (scores + leak * scores.mean(0, keepdim=True)) + rounded)


def lookup_by_pair(text, video):
    """Add a bonus if the positions agree, as code could that keeps captions in the order of their videos."""
    positions = torch.arange(len(text)).unsqueeze(1) // (len(text) // len(video) or 1)
    return Scores(cosines(text, video) + 2.0 * (positions == torch.arange(len(video))))


def in_place(text, video):
    text.sentence.div_(text.sentence.norm(dim=-1, keepdim=True))
    return plain(text, video)


def own_caption(text, video, own):
    return Scores(normalize(text.sentence, dim=-1) @ normalize(video.frames.mean(1) + own.sentence, dim=-1).T)


def test_honest_scores_pass_and_scores_that_leak_are_caught():
    given = *features(), VIDEO_OF_TEXT
    audit = audit_scores(*given, score=honest)
    assert not audit.leaks
    assert audit.recall_with_help == pytest.approx(audit.recall_without_help)
    assert (audit.texts, audit.videos) == (TEXTS, VIDEOS)
    audit = audit_scores(*given, score=batch_statistics)
    assert max(finding.change for finding in audit.findings if finding.leaks) > 0.01
    assert not audit_scores(*given, score=nearly_equal).leaks
    assert audit_scores(*given, score=functools.partial(nearly_equal, leak=0.3)).leaks
    assert compare_scores("infinite", torch.tensor([[torch.inf, 0.0]]), torch.tensor([[1.0, 0.0]])).leaks
    audit = audit_scores(*given, score=lookup_by_pair)
    assert audit.leaks
    assert audit.recall_with_help == 100.0
    assert audit.recall_without_help < 60.0
    assert leaking(audit_scores(*given, score=in_place)) == "scoring changes TextFeatures in place"
    audit = audit_scores(*given, score_as_released=own_caption)
    assert leaking(audit) == "captions of other videos"
    assert audit.recall_with_help > audit.recall_without_help + 20


@pytest.fixture(scope="module")
def data(synthetic):
    sizes = {"frames": 2, "words": 12, "image_size": 32, "batch_size": 8, "eval_batch_size": 5, "num_workers": 0}
    return MSRVTT(root=str(synthetic("msrvtt", 28)), seed=3, **sizes)


@pytest.fixture(scope="module")
def build():
    """Build a method with a small encoder, which all share."""
    torch.manual_seed(0)
    encoder = TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1)
    return lambda kind, **options: kind(encoder, words=12, frames=2, **options)


def recall_of_a_run(method, data):
    """Text-to-video R@1 of a whole evaluation."""
    quiet_trainer().test(method, datamodule=data, verbose=False)
    return method.evaluation.text_to_video["R@1"]


def with_codes(features, codes):
    """Features whose sentences or frames are replaced by a code (N, 64) of each item."""
    if isinstance(features, TextFeatures):
        return dataclasses.replace(features, sentence=codes)
    return dataclasses.replace(features, frames=codes[:, None].expand_as(features.frames))


class UsesPositions(CLIP4Clip):
    """Scores a pair by whether both have the same position in the split."""

    def text_features(self, batch):
        return with_codes(super().text_features(batch), one_hot(batch.index % 64, 64).float())

    def video_features(self, batch):
        return with_codes(super().video_features(batch), one_hot(batch.index % 64, 64).float())


class UsesArrival(CLIP4Clip):
    """Scores a pair by whether both arrived at the same position, counting from the first batch."""

    count = 0

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 0:
            self.count = 0
        super().test_step(batch, batch_idx, dataloader_idx)

    def encode_text(self, text):
        self.count += len(text)
        return with_codes(text, one_hot(torch.arange(self.count - len(text), self.count) % 64, 64).float())

    encode_video = encode_text


class UsesTheTrainer(CLIP4Clip):
    """Looks up captions in the test split and gives each the code of the video that it describes."""

    def code(self, pixels):
        return torch.randn(64, generator=torch.Generator().manual_seed(int(pixels.long().sum())))

    def text_features(self, batch):
        data = self.trainer.datamodule
        split, read = data.load_split("test"), data.video_reader(training=False)
        video_of = {text.text: split.videos[text.video] for text in split.texts}
        codes = torch.stack([self.code(read(video_of[text], None).pixels) for text in batch.text])
        return with_codes(super().text_features(batch), codes)

    def video_features(self, batch):
        codes = torch.stack([self.code(pixels) for pixels in batch.video.pixels])
        return with_codes(super().video_features(batch), codes)


class UsesTheTrainerWhileScoring(CLIP4Clip):
    def score(self, text, video):
        self.trainer.test_dataloaders  # noqa: B018  access alone is forbidden
        return super().score(text, video)


def code_of(text):
    return torch.randint(256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(crc32(text.encode())))


@dataclasses.dataclass(frozen=True)
class StampingReader(MediaReader):
    """Replaces the pixels of a video by a code of its caption."""

    captions: dict = dataclasses.field(default_factory=dict)

    def __call__(self, video, generator):
        media = super().__call__(video, generator)
        media.pixels[:] = code_of(self.captions[video.path]).reshape(8, 1, 8, 1).expand(8, 4, 8, 4).reshape(32, 32)
        return media


class Stamps(MSRVTT):
    """Reads videos together with the captions of the test split, which subclasses obtain in different ways."""

    def captions_of(self, split):
        return {split.videos[text.video].path: text.text for text in split.texts}

    def captions(self):
        return self.captions_of(self.read_split("test"))

    def video_reader(self, training):
        return StampingReader(**vars(super().video_reader(training)), captions=self.captions())


class StampsWhatItSetUp(Stamps):
    known = None

    def setup(self, stage=None):
        super().setup(stage)
        self.known = self.captions_of(self.load_split("test"))

    def video_reader(self, training):
        return super().video_reader(training) if self.known else MSRVTT.video_reader(self, training)

    def captions(self):
        return self.known


class ReadsStamps(CLIP4Clip):
    def text_features(self, batch):
        codes = torch.stack([code_of(text) for text in batch.text])
        return with_codes(super().text_features(batch), codes / 128 - 1)

    def video_features(self, batch):
        codes = batch.video.pixels[:, 0, 0, ::4, ::4].flatten(1)
        return with_codes(super().video_features(batch), codes / 128 - 1)


@pytest.mark.parametrize("kind", [Stamps, StampsWhatItSetUp])
def test_data_that_changes_videos_by_their_captions_is_caught(kind, data, build):
    data, method = kind(**data.hparams), build(ReadsStamps)
    quiet_trainer(callbacks=[LeakageAudit()]).test(method, datamodule=data, verbose=False)
    audit = method.evaluation.audit
    assert method.evaluation.text_to_video["R@1"] == audit.recall_with_help == 100.0
    assert "videos read with other captions" in audit.leaks
    assert audit.recall_without_help < 60.0
    assert kind(**data.hparams).read_split("test") == data.read_split("test"), "the audit leaves the data as it is"
    assert "videos read with other captions" in leaking(audit_method(build(ReadsStamps), kind(**data.hparams)))


class InvertsTheOrder(CLIP4Clip):
    """Adds a bonus to the pairs of a test of this size, whose seeded orders it draws again."""

    def score(self, text, video):
        similarity = super().score(text, video).similarity
        if len(text) == len(video) == TESTED:
            generator = torch.Generator().manual_seed(0)
            texts, videos = (torch.randperm(TESTED, generator=generator) for _ in range(2))
            similarity = similarity + 2.0 * (texts[:, None] == videos)
        return Scores(similarity)


class InvertsTheOrderOfReading(CLIP4Clip):
    """Gives a code of its position to each item of the first batch of a test."""

    def coded(self, features, stream):
        if len(features) < 5:
            return features
        order = torch.from_numpy(np.random.default_rng([3, stream, 0]).permutation(TESTED)[: len(features)])
        return with_codes(features, 10 * one_hot(order, 64).float())

    def encode_text(self, text):
        return self.coded(text, 0)

    def encode_video(self, video):
        return self.coded(video, 1)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (InvertsTheOrder, ["scored in the whole test"]),
        (InvertsTheOrderOfReading, ["encoded in the whole test", "scored in the whole test"]),
    ],
)
def test_the_audit_repeats_the_whole_test(kind, found, data, build):
    assert recall_of_a_run(build(kind), data) > 60.0
    audit = audit_method(build(kind), data, videos=4)
    assert sorted({leak.partition(",")[0] for leak in leaking(audit).split("; ")}) == found
    assert audit.recall_with_help > audit.recall_without_help


class Logs(CLIP4Clip):
    """Does what is allowed: reads the state of the run, and logs."""

    def encode_text(self, text):
        assert self.trainer.precision_plugin.precision == "32-true"
        self.log("step", float(self.global_step + self.trainer.world_size))
        return text.to(self.device)


def test_an_honest_method_passes_and_may_log_and_read_the_state_of_the_run(data, build):
    method, trainer = build(Logs), quiet_trainer()
    audit = audit_method(method, data)
    assert not audit.leaks, leaking(audit)
    assert (audit.texts, audit.videos) == (TESTED, TESTED)
    assert audit.recall_with_help == pytest.approx(audit.recall_without_help)
    trainer.test(method, datamodule=data, verbose=False)
    assert trainer.callback_metrics["step/dataloader_idx_0"] == 1.0


def test_methods_that_use_positions_or_the_order_of_arrival_are_caught_and_gain_nothing(data, build):
    method = build(UsesPositions)
    audit = audit_method(method, data)
    assert "positions in the split given" in leaking(audit)
    assert audit.recall_with_help == 100.0
    assert [audit.recall_without_help, recall_of_a_run(method, data)] == pytest.approx([100 / TESTED] * 2)
    method = build(UsesArrival)
    assert "encoded in another order" in leaking(audit_method(method, data))
    assert recall_of_a_run(method, data) < 40


def test_a_method_that_asks_the_trainer_for_the_ground_truth_is_caught_and_refused(data, build):
    method = build(UsesTheTrainer)
    audit = audit_method(method, data, seed=0)
    assert "accesses trainer.datamodule" in leaking(audit)
    assert audit.recall_with_help > 90.0
    assert audit.recall_without_help < 60.0
    with pytest.raises(UserError, match=r"UsesTheTrainer accesses trainer\.datamodule while it encodes or scores"):
        recall_of_a_run(method, data)
    method = build(UsesTheTrainerWhileScoring)
    assert leaking(audit_method(method, data)) == "accesses trainer.test_dataloaders"
    with pytest.raises(UserError, match=r"trainer\.test_dataloaders"):
        recall_of_a_run(method, data)


class QueueWhileEncoding(CLIP4Clip):
    """Subtracts from every score the video's mean score with the texts encoded so far."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.queue = FeatureQueue(64)

    def encode_text(self, text):
        self.queue.push(text.without_words())
        return super().encode_text(text)

    def score(self, text, video):
        similarity = super().score(text, video).similarity
        if len(self.queue):
            similarity = similarity - super().score(self.queue.records(TextFeatures), video).similarity.mean(0)
        return Scores(similarity)


def memory():
    """Function with an attribute that the audit does not inspect."""


class RemembersElsewhere(CLIP4Clip):
    """Weights the frames of a video by the last encoded texts, which no attribute of the method leads to."""

    def encode_text(self, text):
        memory.texts = text.sentence.mean(0)
        return super().encode_text(text)

    def encode_video(self, video):
        weight = (20 * normalize(video.frames, dim=-1) @ memory.texts).softmax(-1).unsqueeze(-1)
        pooled = (weight * video.frames).sum(1, keepdim=True)
        return dataclasses.replace(video, frames=pooled.expand_as(video.frames))


CACHE = {}


class CachesByPixels(RemembersElsewhere):
    """Keeps the features of each video that it has encoded first, next to any texts."""

    def video_features(self, batch):
        found = super().video_features(batch)
        frames = [
            CACHE.setdefault(pixels.numpy().tobytes(), frames)
            for pixels, frames in zip(batch.video.pixels, found.frames, strict=True)
        ]
        return dataclasses.replace(found, frames=torch.stack(frames))


class KeepsTheMean(CLIP4Clip):
    """Centers texts with the mean of those that it encoded last."""

    def encode_text(self, text):
        self.center = text.sentence.mean(0)
        return super().encode_text(text)

    def score(self, text, video):
        return super().score(dataclasses.replace(text, sentence=text.sentence - self.center), video)


class CentersTheBatch(CLIP4Clip):
    def encode_text(self, text):
        return dataclasses.replace(text, sentence=text.sentence - text.sentence.mean(0))


class NormalizesInPlace(CLIP4Clip):
    def score(self, text, video):
        in_place(text, video)
        return super().score(text, video)


class BanksTheTest(CLIP4Clip):
    """Takes the bank of a normalization from the test split."""

    split = "test"

    def bank(self):
        texts, videos = encode_split(self, self.trainer.datamodule.evaluation_dataloaders(self.split))
        return Bank(texts.features, videos.features)


class BanksTheTraining(BanksTheTest):
    split = "train"


class KeepsTheData(CLIP4Clip):
    def setup(self, stage):
        super().setup(stage)
        self.for_later = [self.trainer.datamodule]

    def configure_model(self):
        super().configure_model()

    def on_test_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.seen = batch


OVERRIDES = "overrides setup; overrides on_test_batch_start; overrides configure_model"


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (NormalizesInPlace, ["scoring changes TextFeatures in place"]),
        (BanksTheTraining, ["overrides bank"]),
        (KeepsTheData, [f"{OVERRIDES}; contains the split's data: for_later"]),
        (QueueWhileEncoding, [f"encoding changed queue.{name}" for name in ("filled", "position", "stored_sentence")]),
        (RemembersElsewhere, ["encoded again in smaller batches, VideoFeatures", "half of the videos encoded"]),
        (KeepsTheMean, ["encoding changed center", "half of the videos encoded"]),
        (CachesByPixels, [f"encoding changed {__name__}.CACHE"]),
        (CentersTheBatch, ["encoded again in smaller batches, TextFeatures"]),
        (BanksTheTest, [f"{TESTED} audited texts in the bank", f"{TESTED} audited videos in the bank"]),
    ],
)
def test_methods_that_leak_are_caught(kind, parts, data, build):
    method = build(kind)
    found = leaking(audit_method(method, data))
    assert all(part in found for part in parts), found
    assert "scoring changed" not in found
    if issubclass(kind, QueueWhileEncoding):
        assert not len(method.queue), "the state is restored"
    if kind is RemembersElsewhere:
        assert "changed" not in found
    if kind in (KeepsTheData, NormalizesInPlace, BanksTheTraining):
        assert [found] == parts, "and nothing else"


class ChangesAttributes(CLIP4Clip):
    """Changes attributes of itself, a submodule and its class while it scores, without an effect on the scores."""

    calls = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = {"texts": [0]}

    def score(self, text, video):
        type(self).calls += 1
        self.seen["texts"].append(len(text))
        self.temperature.asked = True
        return super().score(text, video)


def test_every_attribute_that_scoring_changes_is_named_and_restored(data, build):
    method = build(ChangesAttributes)
    found = leaking(audit_method(method, data))
    assert found == "scoring changed seen; scoring changed temperature.asked; scoring changed ChangesAttributes.calls"
    assert (method.calls, method.seen, hasattr(method.temperature, "asked")) == (0, {"texts": [0]}, False)


class FitsToTheFirstTexts(CLIP4Clip):
    """Centers texts with the mean of those that it scores first, and keeps the mean."""

    def score(self, text, video):
        if not hasattr(self, "center"):
            self.center = text.sentence.mean(0)
        return super().score(dataclasses.replace(text, sentence=text.sentence - self.center), video)


class FitsAtTheStart(CLIP4Clip):
    """Centers texts with the mean of those of the test."""

    def on_test_start(self):
        super().on_test_start()
        texts, _ = encode_split(self, self.trainer.datamodule.evaluation_dataloaders("test"))
        self.center = texts.features.sentence.mean(0)

    def score(self, text, video):
        return super().score(dataclasses.replace(text, sentence=text.sentence - self.center), video)


def test_a_hook_that_sees_the_test_before_it_starts_is_named(data, build):
    method = build(FitsAtTheStart)
    quiet_trainer(callbacks=[LeakageAudit()]).test(method, data, verbose=False)
    audit = method.evaluation.audit
    assert (audit.passed, audit.leaks) == (False, ["overrides on_test_start", "the evaluation changed center"])
    assert str(audit).startswith(f"LEAKAGE found by the audit on {TESTED} videos: {'; '.join(audit.leaks)}; then the ")
    assert str(audit).endswith("failed: AttributeError: 'FitsAtTheStart' object has no attribute 'center'")
    assert "overrides on_test_start" in leaking(audit_method(build(FitsAtTheStart), data))


class OwnTwoStage(TwoStage):
    """A user's own normalization, which keeps the candidates of the split to which it was fitted."""


@pytest.mark.parametrize(
    ("kind", "normalization", "found"),
    [
        (FitsToTheFirstTexts, None, ["the evaluation changed center"]),
        (CachesByPixels, None, [f"the evaluation changed {__name__}.CACHE"]),
        (CLIP4Clip, OwnTwoStage(candidates=4), []),
    ],
)
def test_a_method_that_keeps_what_it_fitted_during_a_test_is_caught(kind, normalization, found, data, build):
    method = build(kind, evaluation=EvaluationConfig(normalization=normalization))
    quiet_trainer(callbacks=[LeakageAudit()]).test(method, data, verbose=False)
    assert [leak for leak in method.evaluation.audit.leaks if "evaluation" in leak] == found
    assert method.evaluation.audit.passed == (not found)


class UndeclaredOneWay(DualSoftmax):
    """Uses all test queries from videos to texts, but declares that it does not."""

    transductive = False

    def fit(self, scores, context):
        if context.direction == "video-to-text":
            return super().fit(scores, context)
        return lambda values, rows, columns: values


def audit_of(normalizer, data, build):
    return audit_method(build(CLIP4Clip, evaluation=EvaluationConfig(normalization=normalizer)), data)


@pytest.mark.parametrize(
    ("normalizer", "transductive"),
    [
        (QueryBankNorm(2.0, k=2), False),
        (SinkhornBias(0.1), False),
        (SinkhornBias(0.1, queries="oracle"), True),
        (TwoStage(4), False),
        (DualSoftmax(2.0), True),
    ],
)
def test_use_of_the_test_set_by_a_normalizer_is_measured(normalizer, transductive, data, build):
    audit = audit_of(normalizer, data, build)
    assert not audit.leaks, leaking(audit)
    assert set(audit.transductive.values()) == {transductive} == {normalizer.transductive}


def test_a_normalizer_that_counts_the_captions_of_the_test_set_is_caught():
    normalizer, generator = SinkhornBias(0.1, marginals="count"), torch.Generator().manual_seed(0)
    movement = normalizer_movement(normalizer, plain, features(), VIDEO_OF_TEXT, None, 0.1, generator)
    assert movement["text-to-video"] > 10 * MOVED
    assert movement["video-to-text"] < MOVED


def test_undeclared_use_of_the_test_queries_is_caught(data, build):
    audit = audit_of(UndeclaredOneWay(2.0), data, build)
    assert leaking(audit) == f"half of the queries, video-to-text with {UndeclaredOneWay(2.0).name}"
    assert audit.transductive == {"text-to-video": False, "video-to-text": True}


@dataclasses.dataclass
class BreaksOnce(Normalizer):
    """Returns NaN for the second of the halves of the queries, and otherwise changes nothing."""

    name, transductive, needs_bank, needs_parts = "breaks", False, False, False
    fits: ClassVar[list[int]] = []

    def fit(self, scores, context):
        self.fits.append(scores.queries)
        nan = len(self.fits) % 3 == 0
        return lambda values, rows, columns: values * (torch.nan if nan else 1.0)


def test_nan_after_a_change_is_a_finding():
    texts, videos = features()

    def breaks(text, video):
        return Scores(cosines(text, video) * (torch.nan if len(text) < TEXTS else 1.0))

    assert "one video at a time" not in leaking(audit_scores(texts, videos, VIDEO_OF_TEXT, score=breaks))
    assert "other partners, blocks of 3" in leaking(audit_scores(texts, videos, VIDEO_OF_TEXT, score=breaks))
    for value in (torch.nan, torch.inf):
        broken = dataclasses.replace(texts, words=texts.words.index_fill(0, torch.tensor([5]), value))
        found = compare_features("encoded", (texts, videos), (broken, videos), 1e-3)
        assert [finding.leaks for finding in found] == [True, False]
    masked = dataclasses.replace(texts, word_mask=texts.word_mask.logical_not())
    assert compare_features("encoded", (texts, videos), (masked, videos), 1e-3)[0].leaks
    generator = torch.Generator().manual_seed(0)
    movement = normalizer_movement(BreaksOnce(), plain, (texts, videos), VIDEO_OF_TEXT, None, 0.1, generator)
    assert not any(change <= MOVED for change in movement.values())


@pytest.mark.filterwarnings("ignore:protocol. as-released scores every video under its own caption")
@pytest.mark.parametrize(
    ("options", "sentences", "expected"),
    [
        (
            ["--data.init_args.on_corrupt=skip", AUDIT],
            [f"Leakage: none found by the audit on {TESTED - 1} videos"],
            {"passed": True, "videos": TESTED - 1, "leaks": []},
        ),
        (["--data.init_args.on_corrupt=skip"], ["Leakage: not audited"], None),
        (
            ["--config=variants/tmass-as-released", "--model.init_args.evaluation.normalization=DualSoftmax", AUDIT],
            [
                f"LEAKAGE found by the audit on {TESTED} videos: captions of other videos; their R@1 is",
                "(uses the whole test set, measured)",
            ],
            {"passed": False, "transductive": {"text-to-video": True, "video-to-text": True}},
        ),
    ],
)
def test_the_table_and_the_results_of_a_test_state_its_audit(synthetic, tmp_path, capsys, options, sentences, expected):
    root = shutil.copytree(synthetic("msrvtt", 28), tmp_path / "data")
    broken = MSRVTT(root=str(root)).read_split("test").videos[0].path
    skips = "skip" in options[0]
    if skips:
        broken.write_bytes(b"no video")
    options = small_run(root, tmp_path / "runs", *options, recipe="clip4clip" if skips else "tmass")
    assert main(["test", *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(sentence in printed for sentence in sentences)
    results = json.loads(next(tmp_path.glob("runs/*/*/results.json")).read_text())
    assert [reason.partition(": ")[0] for reason in results["skipped"]] == [str(broken)][:skips]
    audit = results["audit"]
    assert (audit and {name: audit[name] for name in expected}) == expected


def test_audits_that_are_too_small_or_take_too_long_are_refused(data, build):
    with pytest.raises(ValueError, match=r"EvaluationConfig\.audit is 3; expected a whole number \(at least 4\) or 0"):
        EvaluationConfig(audit=3)
    with pytest.raises(UserError, match="did not end within 0 s"):
        audit_method(build(CLIP4Clip), data, seconds=0.0)
    result = AuditResult(passed=False, problem="ValueError: too few")
    assert str(result) == "Leakage: not audited, since the audit failed: ValueError: too few"
