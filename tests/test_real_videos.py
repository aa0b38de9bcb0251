"""Training and evaluation on real videos with real captions (TVR_TEST_DATA)."""

import csv
import json

import pandas as pd
import pytest
from small_run import small_run

from tvr_lightning.cli import main

HELD_OUT = 12
ONE_EPOCH = ("--trainer.max_epochs=1", "--data.init_args.captions_per_epoch=one")


@pytest.fixture(scope="module")
def real_root(test_data, tmp_path_factory):
    """60 real clips in MSR-VTT's layout, in their own containers."""
    root = tmp_path_factory.mktemp("real")
    folder = root / "msrvtt"
    (folder / "videos").mkdir(parents=True)
    with (test_data / "clips" / "captions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [f"video{number}" for number in range(len(rows))]
    for name, row in zip(names, rows, strict=True):
        source = test_data / "clips" / row["file"]
        (folder / "videos" / f"{name}{source.suffix}").symlink_to(source)
    sentences = []
    for name, row in zip(names, rows, strict=True):
        sentences += [{"caption": row[key], "video_id": name} for key in ("caption1", "caption2")]
    content = {"videos": [{"video_id": name} for name in names], "sentences": sentences}
    (folder / "MSRVTT_data.json").write_text(json.dumps(content))
    pd.Series(names[HELD_OUT:], name="video_id").to_csv(folder / "MSRVTT_train.9k.csv", index=False)
    test = {"video_id": names[:HELD_OUT], "sentence": [row["caption1"] for row in rows[:HELD_OUT]]}
    pd.DataFrame(test).to_csv(folder / "MSRVTT_JSFUSION_test.csv", index=False)
    return root


def test_sixty_real_clips_train_and_evaluate(real_root, tmp_path):
    assert main(["fit", *small_run(real_root, tmp_path, "--trainer.check_val_every_n_epoch=2", *ONE_EPOCH)]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert (results["texts"], results["videos"]) == (HELD_OUT, HELD_OUT)
    assert results["partial"] is False
    assert results["skipped"] == []


def test_fifteen_real_msrvtt_clips_train_and_evaluate_and_missing_ones_are_counted(test_data, tmp_path, capsys):
    root = test_data / "annotations"
    assert main(["fit", *small_run(root, tmp_path, "--data.init_args.on_corrupt=skip", *ONE_EPOCH)]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert results["partial"] is True
    assert 0 < results["videos"] < 15
    assert results["texts"] == results["videos"]
    assert len(results["skipped"]) > 900
    assert all("no such file" in reason for reason in results["skipped"])
    assert main(["fit", *small_run(root, tmp_path)]) == 1
    assert "on_corrupt" in capsys.readouterr().err
