"""What every method inherits: construction, the loss over pairs, the temperature, the guard against broken losses."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.data.batch import PairBatch, TextBatch, VideoBatch
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.evaluation.metrics import RecallAtK
from tvr_lightning.features import PairedFeatures, TextFeatures, VideoFeatures
from tvr_lightning.layers.temperature import Temperature
from tvr_lightning.layers.temporal import SeqTransf
from tvr_lightning.methods import GARE, NCL, TCMGC, CLIP4Clip
from tvr_lightning.methods.clip4clip import CLIP4ClipOptions
from tvr_lightning.synthetic import synthesize
from tvr_lightning.training.checkpoints import CheckpointError


@pytest.fixture(scope="module")
def encoder() -> TinyClipEncoder:
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, text_layers=4, vision_layers=1)


def features(pairs: int, dimension: int = 64, seed: int = 0) -> tuple[TextFeatures, VideoFeatures]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(pairs, 8, dimension, generator=generator)
    frames = torch.randn(pairs, 4, dimension, generator=generator)
    text = TextFeatures(words[:, 0], words, torch.ones(pairs, 8, dtype=torch.bool))
    return text, VideoFeatures(frames, torch.ones(pairs, 4, dtype=torch.bool))


def batch(video: VideoFeatures, text: TextFeatures) -> PairBatch:
    index = torch.arange(len(text))
    names = [f"video{i}" for i in range(len(text))]
    return PairBatch(TextBatch(text, index), VideoBatch(video, index, names))


def test_words_beyond_the_encoders_context_become_its_context(encoder):
    assert CLIP4Clip(encoder, words=78).words == 77
    assert CLIP4Clip(encoder, words=30).words == 30


def test_the_base_loss_is_symmetric_cross_entropy_of_the_scaled_scores(encoder):
    method = CLIP4Clip(encoder, words=8, frames=4)
    text, video = features(5)
    index = torch.arange(5)
    terms = method.losses(PairedFeatures(text, video, index, index))
    logits = method.temperature() * method.score(text, video).similarity
    expected = -(logits.log_softmax(1).diag().mean() + logits.log_softmax(0).diag().mean()) / 2
    torch.testing.assert_close(terms["info_nce"], expected)


def test_local_losses_are_refused_where_a_loss_needs_all_scores(encoder):
    assert CLIP4Clip(encoder, words=8, gather="local").gather == "local"
    for method, contrast in ((GARE, None), (TCMGC, None), (CLIP4Clip, NCL())):
        name = f"NCL on {method.__name__}" if contrast else method.__name__
        with pytest.raises(ValueError, match=f"the loss of {name} needs the scores of the whole batch"):
            method(encoder, words=8, gather="local", contrast=contrast)


def test_a_broken_loss_names_term_step_and_videos(encoder):
    method = CLIP4Clip(encoder, words=8, frames=4)
    text, video = features(3)
    video.frames[1] = float("nan")
    pairs = batch(video, text)
    method.total_loss(method.losses(method.pair_features(pairs)), pairs)
    with pytest.raises(UserError, match=r"step 0: .*info_nce = nan.*video0, video1, video2"):
        method.on_before_optimizer_step(torch.optim.SGD(method.parameters()))


def test_the_temperature_never_exceeds_one_hundred():
    temperature = Temperature(math.log(1 / 0.07))
    assert temperature().item() == pytest.approx(1 / 0.07)
    with torch.no_grad():
        temperature.logit_scale.fill_(9.0)
    temperature.clamp()
    assert temperature().item() == pytest.approx(100.0)
    assert Temperature(7.0)().item() == pytest.approx(100.0)


def test_an_encoder_built_in_python_is_not_copied(monkeypatch):
    def refuse(self, memo):
        raise AssertionError("copied")

    monkeypatch.setattr(TinyClipEncoder, "__deepcopy__", refuse, raising=False)
    method = CLIP4Clip(TinyClipEncoder(width=64), words=8, frames=2)
    assert method.hparams["words"] == 8
    assert "encoder" not in method.hparams


def test_hyper_parameters_hold_plain_values_only(encoder):
    method = CLIP4Clip(encoder, evaluation=EvaluationConfig(recall=[1, 50]), words=8)
    assert method.hparams["words"] == 8
    assert method.hparams["evaluation"]["recall"] == [1, 50]
    assert "encoder" not in method.hparams


@pytest.mark.parametrize("recall", [[], [0, 1], [5, 1], [1, 1]])
def test_recall_must_ascend_from_one(recall):
    with pytest.raises(ValueError, match=r"evaluation\.recall"):
        EvaluationConfig(recall=recall)


@pytest.mark.parametrize(("option", "value"), [("memory_gib", 0.0), ("top_k", 0)])
def test_evaluation_options_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=option):
        EvaluationConfig(**{option: value})


def test_a_recipe_adds_metrics_to_the_table(tmp_path):
    synthesize("msrvtt", tmp_path, 10, 0, workers=1, progress=False)
    recipes = Path(__file__).parents[1] / "recipes"
    metrics = '[{"class_path": "RecallAtK", "init_args": {"k": 3}}, {"class_path": "NDCG"}, {"class_path": "MRR"}]'
    method, _ = from_recipe(
        [recipes / "clip4clip.yaml", recipes / "fixture.yaml"],
        [f"--model.init_args.evaluation.metrics={metrics}", f"--data.init_args.root={tmp_path}"],
    )
    named = method.metrics["test"].named()
    assert list(named)[6:10] == ["t2v_R@3", "t2v_nDCG@10", "t2v_MRR", "v2t_R@1"]
    assert named["t2v_R@3"] is not named["v2t_R@3"]
    assert method.hparams["evaluation"]["metrics"][0]["init_args"] == {"k": 3}
    with pytest.raises(ValueError, match="several metrics with one name"):
        EvaluationConfig(metrics=[RecallAtK(3), RecallAtK(3)])


def test_padded_frames_do_not_change_a_score(encoder):
    method = CLIP4Clip(encoder, words=8, frames=4, clip4clip=CLIP4ClipOptions(SeqTransf(2)))
    text, video = features(3)
    video.frame_mask[:, 2:] = False

    def score(frames: Tensor) -> Tensor:
        return method.score(text, method.encode_video(VideoFeatures(frames, video.frame_mask))).similarity

    changed = video.frames.clone()
    changed[:, 2:] = 5.0
    torch.testing.assert_close(score(video.frames), score(changed))


def test_checkpoints_of_other_methods_and_sizes_are_refused(encoder):
    method = CLIP4Clip(encoder, words=8, frames=4)
    own = {
        "state_dict": method.state_dict(),
        "hyper_parameters": {"_class_path": "x.CLIP4Clip", "words": 6, "frames": 4},
    }
    method.on_load_checkpoint(own)
    with pytest.raises(CheckpointError, match="contains GARE, but the recipe builds CLIP4Clip"):
        method.on_load_checkpoint({**own, "hyper_parameters": {"_class_path": "x.GARE"}})
    state = dict(method.state_dict())
    state["temperature.logit_scale"] = torch.zeros(2)
    state["more"] = torch.zeros(1)
    with pytest.raises(
        CheckpointError,
        match=r"shape \(2,\), expected \(1,\).*more has .* expected none\. .*trained with words 6 \(here: 8\)\. Use",
    ):
        method.on_load_checkpoint({**own, "state_dict": state})
