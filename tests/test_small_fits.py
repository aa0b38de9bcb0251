"""Methods train on the synthetic version of every dataset and on real videos with real captions (TVR_TEST_DATA)."""

import json

import pandas as pd
import pytest
from small_run import small_run

from tvr_lightning.cli import main

DATASETS = ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]
SLOW = pytest.mark.slow
HELD_OUT = 4
SHORT = ("--trainer.max_epochs=1", "--data.init_args.captions_per_epoch=one")


@pytest.mark.parametrize("dataset", [name if name == "vatex" else pytest.param(name, marks=SLOW) for name in DATASETS])
def test_a_run_with_the_overlay_of_a_dataset_ends_in_a_table(dataset, synthetic, tmp_path, capsys):
    overlays = (f"--config=data/{dataset}", "--config=fixture", "--config=variants/select-on-test")
    batch = ("--data.init_args.batch_size=2", "--model.init_args.released_devices=null")
    short = (*batch, "--trainer.max_epochs=1")
    assert main(["fit", *small_run(synthetic(dataset, 8), tmp_path, *overlays, *short, recipe="tcmgc")]) == 0
    (path,) = tmp_path.glob("*/version_0/results.json")
    results = json.loads(path.read_text())
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
    assert main(["fit", *options]) == 0
    (path,) = tmp_path.glob("runs/*/*/results.json")
    results = json.loads(path.read_text())
    assert (results["texts"], results["videos"]) == (HELD_OUT, HELD_OUT)
    assert results["partial"] is False
    assert results["skipped"] == []


@pytest.mark.slow
def test_fifteen_real_msrvtt_clips_train_and_evaluate_and_missing_ones_are_counted(test_data, tmp_path, capsys):
    options = small_run(test_data / "annotations", tmp_path, *SHORT)
    assert main(["fit", *options, "--data.init_args.on_corrupt=skip"]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert results["partial"] is True
    assert 0 < results["videos"] < 15
    assert results["texts"] == results["videos"]
    assert len(results["skipped"]) > 900
    assert all("no such file" in reason for reason in results["skipped"])
    assert main(["fit", *options]) == 2
    assert "on_corrupt" in capsys.readouterr().err
