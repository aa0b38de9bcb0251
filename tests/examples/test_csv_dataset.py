"""The dataset of docs/adding-a-dataset.md is read, checked, trained on, and tested."""

import csv
import json
from pathlib import Path

import pytest
from examples.csv_dataset import CsvDataset

from tvr_lightning.cli import main
from tvr_lightning.data.check import check
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.synthetic import synthesize

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Parent folder of a dataset with 12 training and 4 test videos; the first has two captions."""
    root = tmp_path_factory.mktemp("data")
    synthesize("msrvtt", root, 16, 0, workers=1, progress=False)
    (root / "msrvtt").rename(root / "csv")
    rows = [("test" if i < 4 else "train", f"video{i}.mp4", f"caption {i}") for i in range(16)]
    with (root / "csv" / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("split", "video", "caption"), ("test", "video0.mp4", "another"), *rows])
    return root


def test_splits_follow_the_table(root):
    data = CsvDataset(split="table", root=str(root), frames=2, num_workers=0)
    test = data.read_split("test")
    assert [video.video_id for video in test.videos] == [f"video{i}.mp4" for i in range(4)]
    assert [text.text for text in test.texts] == ["another", "caption 0", "caption 1", "caption 2", "caption 3"]
    assert len(data.read_split("train").videos) == 12
    assert not check(data, progress=False).problems


def test_a_table_without_captions_is_refused(root, tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "captions.csv").write_text("split,video\ntest,video0.mp4\n")
    with pytest.raises(AnnotationError, match="column 'caption' is missing"):
        CsvDataset(split="table", root=str(tmp_path)).read_split("test")


def test_a_method_trains_and_is_tested_on_it(root, tmp_path):
    options = [
        f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={HERE / 'csv_dataset.yaml'}",
        f"--config={RECIPES / 'fixture.yaml'}", f"--data.init_args.root={root}", "--data.init_args.batch_size=4",
        "--data.init_args.num_workers=0", "--data.init_args.frames=2", f"--results.directory={tmp_path}",
        "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=1", "--trainer.accelerator=cpu",
        "--trainer.log_every_n_steps=1", "--trainer.check_val_every_n_epoch=1",
    ]  # fmt: skip
    assert main(["fit", *options]) == 0
    (results,) = tmp_path.glob("*/version_0/results.json")
    found = json.loads(results.read_text())
    assert (found["dataset"], found["texts"], found["videos"]) == ("synthetic CSV", 5, 4)
