"""Methods train on SigLIP 2, Perception Encoder, and MobileCLIP, patches included."""

import json
import math

import pytest
import torch
from small_run import small_run
from small_towers import save_model

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.testing import method_recipes
from tvr_lightning.testing.processes import quiet_trainer

METHODS = [path.stem for path in method_recipes(RECIPES).values()]
KINDS = ["siglip2", "pe", "mobileclip"]
CASES = [(method, "siglip2") for method in METHODS] + [("dpdv", "pe"), ("dpdv", "mobileclip"), ("ucofia", "mobileclip")]


@pytest.fixture
def model(kind, built_once):
    return f"local-dir:{built_once(f'tower-{kind}', lambda path: save_model(kind, path / 'model')) / 'model'}"


def recipe(data, runs, model, method):
    """Options of a short run of a method on a model."""
    encoder = json.dumps({"class_path": "ClipEncoder", "init_args": {"architecture": model, "weights": "folder"}})
    audio = ["--model.init_args.audio_encoder=TinyWhisperEncoder"] if method == "gaid" else []
    more = ("--data.init_args.words=24", "--trainer.limit_train_batches=2", "--trainer.max_epochs=1")
    options = small_run(data, runs, *more, *audio, recipe=method)
    return [
        *(option for option in options if "encoder.init_args" not in option),
        f"--model.init_args.encoder={encoder}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_every_method_trains_on_these_encoders(msrvtt, model, tmp_path, method):
    module, data = from_recipe([], recipe(msrvtt, tmp_path, model, method))
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert module.evaluation.partial is False


@pytest.mark.parametrize("kind", ["pe"])
def test_a_method_with_patches_trains_on_an_encoder_with_an_attention_pool(msrvtt, model, tmp_path, capsys):
    assert main(["fit", *recipe(msrvtt, tmp_path, model, "ucofia")]) == 0
    (path,) = tmp_path.glob("*/version_0/results.json")
    results = json.loads(path.read_text())
    assert results["partial"] is False
    assert results["preprocessing"] == {
        "words_asked": 24, "words": 12, "preparation": "32 pixels, bilinear both sides, squashed",
    }  # fmt: skip
    assert capsys.readouterr().err.count("words is 24, but") <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_module_prepares_frames_for_the_encoder(msrvtt, model, tmp_path, kind):
    method, module = from_recipe([], recipe(msrvtt, tmp_path, model, "clip4clip"))
    assert module.preparation == method.encoder.preparation
    assert module.preparation.resize_mode == ("shortest" if kind == "mobileclip" else "squash")
    assert module.words == 24
    assert method.words == min(24, method.encoder.context_length)
    # SigLIP2's, above CLIP's bound of ln 100, and not the default of random weights
    expected = 4.7 if kind == "siglip2" else math.log(1 / 0.07)
    assert method.temperature.logit_scale.item() == pytest.approx(expected)
    module.setup("test")
    videos = next(iter(module.test_dataloader()[1]))
    features = method.encoder.encode_video(videos.video, patches=True)
    assert features.patches.shape[:2] == features.frames.shape[:2]
    assert torch.isfinite(features.patches).all()
