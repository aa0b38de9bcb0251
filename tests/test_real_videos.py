"""Training and evaluation on real videos with real captions (TVR_TEST_DATA)."""

import csv
import json
from pathlib import Path

import pytest

from tvr_lightning.cli import main

RECIPES = Path(__file__).parent.parent / "recipes"
HELD_OUT = 12


@pytest.fixture(scope="module")
def real_root(test_data, tmp_path_factory) -> Path:
    """The 60 real clips in MSR-VTT's layout; clips keep their containers, so ids carry the file's ending."""
    root = tmp_path_factory.mktemp("real")
    folder = root / "msrvtt"
    (folder / "videos").mkdir(parents=True)
    with (test_data / "clips" / "captions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    videos, sentences = [], []
    for number, row in enumerate(rows):
        name = f"video{number}"
        source = test_data / "clips" / row["file"]
        (folder / "videos" / f"{name}{source.suffix}").symlink_to(source)
        split = "test" if number < HELD_OUT else "train"
        videos.append({"video_id": name, "split": split, "id": number, "category": 0})
        sentences += [
            {"caption": row[key], "video_id": name, "sen_id": len(sentences) + i}
            for i, key in enumerate(("caption1", "caption2"))
        ]
    (folder / "MSRVTT_data.json").write_text(json.dumps({"info": {}, "videos": videos, "sentences": sentences}))
    train = [video["video_id"] for video in videos if video["split"] == "train"]
    for name in ("MSRVTT_train.9k.csv", "MSRVTT_train.7k.csv"):
        (folder / name).write_text("\n".join(["video_id", *train]) + "\n")
    with (folder / "MSRVTT_JSFUSION_test.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["key", "vid_key", "video_id", "sentence"])
        for number, row in enumerate(rows[:HELD_OUT]):
            writer.writerow([f"ret{number}", f"msr{number}", f"video{number}", row["caption1"]])
    return root


def options(root: Path, runs: Path, *more: str) -> list[str]:
    return [
        f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={RECIPES / 'fixture.yaml'}",
        f"--data.init_args.root={root}", f"--results.directory={runs}", "--data.init_args.batch_size=16",
        "--data.init_args.frames=4", "--data.init_args.num_workers=1", "--trainer.accelerator=cpu",
        "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1",
        "--trainer.check_val_every_n_epoch=1", *more,
    ]  # fmt: skip


def test_sixty_real_clips_train_and_evaluate(real_root, tmp_path):
    assert main(["fit", *options(real_root, tmp_path)]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert (results["texts"], results["videos"]) == (HELD_OUT, HELD_OUT)
    assert results["partial"] is False
    assert results["skipped"] == []


def test_fifteen_real_msrvtt_clips_train_and_evaluate_and_the_absent_are_counted(test_data, tmp_path):
    root = test_data / "annotations"
    more = ["--data.init_args.on_corrupt=skip", "--data.init_args.batch_size=4"]
    assert main(["fit", *options(root, tmp_path, *more)]) == 0
    (path,) = tmp_path.glob("*/*/results.json")
    results = json.loads(path.read_text())
    assert results["partial"] is True
    assert 0 < results["videos"] < 15
    assert results["texts"] == results["videos"]
    assert len(results["skipped"]) > 900
    assert all("no such file" in reason for reason in results["skipped"])


def test_absent_videos_stop_the_run_unless_skipping_is_asked_for(test_data, tmp_path, capsys):
    assert main(["fit", *options(test_data / "annotations", tmp_path)]) == 1
    assert "on_corrupt" in capsys.readouterr().err
