"""The base class of methods: its options, temperature, and checks of data and checkpoints."""

import math

import pytest
import torch
from methods.parts import encoder

from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.encoders import TinyClipEncoder
from tvr_lightning.errors import UserError
from tvr_lightning.evaluation.config import EvaluationConfig
from tvr_lightning.methods import GARE, NCL, TCMGC, CLIP4Clip
from tvr_lightning.metrics import RecallSum, RetrievalRecall
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.training.checkpoints import CheckpointError


def test_local_losses_are_refused_if_a_loss_needs_all_scores():
    assert CLIP4Clip(encoder(), words=8, gather="local").gather == "local"
    for method, contrast in ((GARE, None), (TCMGC, None), (CLIP4Clip, NCL())):
        name = f"NCL on {method.__name__}" if contrast else method.__name__
        with pytest.raises(ValueError, match=f"the loss of {name} needs the scores of the whole batch"):
            method(encoder(), words=8, gather="local", contrast=contrast)


@pytest.mark.parametrize(("bias", "largest"), [(-16.0, 117.0), (0.0, 100.0)])
def test_only_weights_of_a_sigmoid_loss_keep_a_temperature_above_one_hundred(bias, largest):
    class Encoder(TinyClipEncoder):
        def initial_logit_scale(self):
            return math.log(117.0)

        def initial_logit_bias(self):
            return bias

    method = CLIP4Clip(Encoder(width=64, text_layers=1, vision_layers=1), words=8)
    assert 1 / method.score_temperature() == pytest.approx(largest)
    method.temperature.clamp()
    assert 1 / method.score_temperature() == pytest.approx(largest)


def test_hyperparameters_are_plain_values_without_a_copy_of_the_encoder(monkeypatch):
    def refuse(self, memo):
        raise AssertionError("copied")

    monkeypatch.setattr(TinyClipEncoder, "__deepcopy__", refuse, raising=False)
    method = CLIP4Clip(TinyClipEncoder(width=64), evaluation=EvaluationConfig(recall=[1, 50]), words=78)
    assert method.hparams["words"] == 78
    assert method.hparams["evaluation"]["recall"] == [1, 50]
    assert "encoder" not in method.hparams
    assert method.words == 77  # the context of the encoder


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("recall", [[], [0, 1], [5, 1], [1, 1]]),
        ("memory_gib", [0.0]),
        ("top_k", [0]),
        ("metrics", [[RetrievalRecall(3)] * 2, [RecallSum([3])], [RetrievalRecall(3, "video-to-text")]]),
    ],
)
def test_evaluation_options_out_of_range_are_refused(option, values):
    message = "several metrics with one name|computed in both directions" if option == "metrics" else option
    for value in values:
        with pytest.raises(ValueError, match=message):
            EvaluationConfig(**{option: value})


def test_a_recipe_adds_metrics_to_the_table(msrvtt):
    recall = '{"class_path": "RetrievalRecall", "init_args": {"k": 3}}'
    metrics = f'[{recall}, {{"class_path": "NDCG"}}, {{"class_path": "MRR"}}]'
    options = [f"--model.init_args.evaluation.metrics={metrics}", f"--data.init_args.root={msrvtt}"]
    method, _ = from_recipe(["clip4clip", "fixture"], options)
    assert [metric.name for metric in method.evaluation_config.metrics] == ["R@3", "nDCG@10", "MRR"]
    assert method.hparams["evaluation"]["metrics"][0]["init_args"] == {"k": 3, "direction": "text-to-video"}


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, "image_size=32"),
        ({"image_size": 32, "frames": 3}, "frames=4"),
        ({"image_size": 32, "resize_mode": "squash"}, "resize_mode='shortest'"),
        ({"image_size": 32, "interpolation": "bilinear"}, "interpolation='bicubic'"),
    ],
)
def test_data_that_prepares_other_frames_than_the_encoder_needs_is_refused(change, missing, msrvtt):
    data = MSRVTT(root=str(msrvtt), num_workers=0, **{"frames": 4} | change)
    with pytest.raises(UserError, match=rf"MSRVTT reads other frames than CLIP4Clip needs\. Pass it {missing}\."):
        quiet_trainer().validate(CLIP4Clip(encoder(), frames=4), data)


def test_checkpoints_of_other_methods_and_sizes_are_refused():
    method = CLIP4Clip(encoder(), words=8, frames=4)
    settings = {"_class_path": "x.CLIP4Clip", "words": 6, "frames": 4}
    own = {"state_dict": method.state_dict(), "hyper_parameters": settings}
    method.on_load_checkpoint(own)
    with pytest.raises(CheckpointError, match="contains GARE, but the recipe builds CLIP4Clip"):
        method.on_load_checkpoint({**own, "hyper_parameters": {"_class_path": "x.GARE"}})
    state = method.state_dict() | {"temperature.logit_scale": torch.zeros(2), "more": torch.zeros(1)}
    shapes = r"shape \(2,\), expected \(1,\).*more has .* expected none\."
    with pytest.raises(CheckpointError, match=shapes + r" .*trained with words 6 \(here: 8\)\. Use"):
        method.on_load_checkpoint({**own, "state_dict": state})
