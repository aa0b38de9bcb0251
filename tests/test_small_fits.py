"""Methods train on every synthetic dataset, on real videos (TVR_TEST_DATA), and on encoders with other towers."""

import json
import math

import pandas as pd
import pytest
import torch
from small_run import small_run
from small_towers import save_model

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.config.recipe_files import RECIPES
from tvr_lightning.testing import method_recipes
from tvr_lightning.testing.processes import quiet_trainer

DATASETS = ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]
SLOW = pytest.mark.slow
HELD_OUT = 4
SHORT = ("--trainer.max_epochs=1", "--data.init_args.captions_per_epoch=one")
METHODS = [path.stem for path in method_recipes(RECIPES).values()]
KINDS = ["siglip2", "pe", "mobileclip"]
CASES = [(method, "siglip2") for method in METHODS] + [("dpdv", "pe"), ("dpdv", "mobileclip"), ("ucofia", "mobileclip")]


def fit(runs, *options):
    """Results of a run that writes to a folder."""
    assert main(["fit", *options]) == 0
    (path,) = runs.glob("*/*/results.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("dataset", [name if name == "vatex" else pytest.param(name, marks=SLOW) for name in DATASETS])
def test_a_run_with_the_overlay_of_a_dataset_ends_in_a_table(dataset, synthetic, tmp_path, capsys):
    overlays = (f"--config=data/{dataset}", "--config=fixture", "--config=variants/select-on-test")
    batch = ("--data.init_args.batch_size=2", "--model.init_args.released_devices=null")
    short = (*batch, "--trainer.max_epochs=1")
    results = fit(tmp_path, *small_run(synthetic(dataset, 8), tmp_path, *overlays, *short, recipe="tcmgc"))
    assert results["partial"] is False
    assert (results["select_on"], results["weights"]["kind"]) == ("test", "best")
    assert results["protocol"].split(",")[0].split()[0] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("clips", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_real_clips_train_and_evaluate(clips, test_data, tmp_path):
    folder = tmp_path / "data" / "msrvtt"
    (folder / "videos").mkdir(parents=True)
    table = pd.read_csv(test_data / "clips" / "captions.csv")
    rows = table.sort_values("file", key=lambda files: files.str.endswith(".mp4"), kind="stable")  # others first
    rows = rows[:clips].assign(video_id=[f"video{number}" for number in range(clips)])
    for row in rows.itertuples():
        source = test_data / "clips" / row.file
        (folder / "videos" / f"{row.video_id}{source.suffix}").symlink_to(source)
    captions = rows.melt("video_id", ["caption1", "caption2"], value_name="caption")[["caption", "video_id"]]
    content = {"videos": rows[["video_id"]].to_dict("records"), "sentences": captions.to_dict("records")}
    (folder / "MSRVTT_data.json").write_text(json.dumps(content))
    rows["video_id"][HELD_OUT:].to_csv(folder / "MSRVTT_train.9k.csv", index=False)
    test = rows[:HELD_OUT][["video_id", "caption1"]].set_axis(["video_id", "sentence"], axis=1)
    test.to_csv(folder / "MSRVTT_JSFUSION_test.csv", index=False)
    options = small_run(tmp_path / "data", tmp_path / "runs", "--trainer.check_val_every_n_epoch=2", *SHORT)
    results = fit(tmp_path / "runs", *options)
    assert (results["texts"], results["videos"]) == (HELD_OUT, HELD_OUT)
    assert results["partial"] is False
    assert results["skipped"] == []


@pytest.mark.slow
def test_fifteen_real_msrvtt_clips_train_and_evaluate_and_missing_ones_are_counted(test_data, tmp_path, capsys):
    options = small_run(test_data / "annotations", tmp_path, *SHORT)
    results = fit(tmp_path, *options, "--data.init_args.on_corrupt=skip")
    assert results["partial"] is True
    assert 0 < results["videos"] < 15
    assert results["texts"] == results["videos"]
    assert len(results["skipped"]) > 900
    assert all("no such file" in reason for reason in results["skipped"])
    assert main(["fit", *options]) == 2
    assert "on_corrupt" in capsys.readouterr().err


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
    results = fit(tmp_path, *recipe(msrvtt, tmp_path, model, "ucofia"))
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
