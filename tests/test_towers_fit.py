"""Every method trains on today's encoders, patches included, and `tvr test` scores what was trained."""

import json
import math
from pathlib import Path

import pytest
import torch
from small_towers import save_model

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe

RECIPES = Path(__file__).parent.parent / "recipes"
METHODS = ["clip4clip", "dpdv", "drl", "gaid", "gare", "ncl", "tcmgc", "tmass", "ucofia", "xclip", "xpool"]
KINDS = ["siglip2", "pe", "mobileclip"]
PATCHES = ["dpdv", "ucofia"]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("towers")
    return {kind: save_model(kind, root / kind) for kind in KINDS}


def recipe(folder: Path, data: Path, model: str, method: str) -> list[str]:
    """Options of a short run of a method on a model."""
    overlay = folder / "tower.yaml"
    options = {"architecture": model, "weights": "folder"}
    encoder = {"class_path": "ClipEncoder", "init_args": options}
    overlay.write_text(json.dumps({"model": {"init_args": {"encoder": encoder}}}))
    sound = ["--model.init_args.audio_encoder=TinyWhisperEncoder"] if method == "gaid" else []
    return [
        f"--config={RECIPES / method}.yaml", f"--config={RECIPES / 'fixture.yaml'}", f"--config={overlay}", *sound,
        f"--data.init_args.root={data}", f"--results.directory={folder / 'runs'}", "--data.init_args.batch_size=4",
        "--data.init_args.num_workers=0", "--data.init_args.frames=3", "--data.init_args.words=24",
    ]  # fmt: skip


def fit_and_test(folder: Path, data: Path, model: str, method: str) -> dict:
    options = [*recipe(folder, data, model, method), "--trainer.accelerator=cpu"]
    short = ["max_epochs=1", "limit_train_batches=2", "check_val_every_n_epoch=1", "log_every_n_steps=1"]
    assert main(["fit", *options, *(f"--trainer.{option}" for option in short)]) == 0
    (checkpoint,) = (folder / "runs").glob("*/version_0/checkpoints/last.ckpt")
    assert main(["test", *options, f"--ckpt_path={checkpoint}"]) == 0
    (path,) = (folder / "runs").glob("*/version_1/results.json")
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_every_kind_of_encoder(msrvtt, models, tmp_path, kind, method):
    results = fit_and_test(tmp_path, msrvtt, models[kind], method)
    assert results["partial"] is False
    assert results["weights"]["kind"] == "last"


def test_a_method_with_patches_trains_on_an_encoder_with_an_attention_pool(msrvtt, models, tmp_path, capsys):
    results = fit_and_test(tmp_path, msrvtt, models["pe"], "ucofia")
    assert results["partial"] is False
    assert results["preprocessing"] == {
        "words_asked": 24, "words": 12, "preparation": "32 pixels, bilinear both sides, squashed",
    }  # fmt: skip
    assert capsys.readouterr().err.count("words is 24, but") <= 2  # once in each of the two verbs


@pytest.mark.parametrize("kind", KINDS)
def test_the_data_prepare_frames_as_the_encoder_asks(msrvtt, models, tmp_path, kind):
    options = recipe(tmp_path, msrvtt, models[kind], "clip4clip")
    method, module = from_recipe([], options)
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
