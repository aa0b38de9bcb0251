"""The dataset of docs/adding-a-dataset.md: it is read, checked and trained on like the others."""

import csv
import json
from pathlib import Path

import pytest
from examples.caption_table import CaptionTable

from tvr_lightning.cli import main
from tvr_lightning.data.records import AnnotationError
from tvr_lightning.synthetic import synthesize

HERE = Path(__file__).parent
RECIPES = HERE.parent.parent / "recipes"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with the table and the videos of a few synthetic clips, two captions for the first."""
    root = tmp_path_factory.mktemp("own")
    synthesize("msrvtt", root, 20, 0, workers=1, progress=False)
    folder = (root / "msrvtt").rename(root / "caption-table")
    said: dict[str, list[str]] = {}
    for item in json.loads((folder / "MSRVTT_data.json").read_text())["sentences"]:
        said.setdefault(item["video_id"], []).append(item["caption"])
    with (folder / "captions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["split", "video", "caption"])
        for place, (video, captions) in enumerate(sorted(said.items())):
            kept = captions[:2] if place == 0 else captions[:1]
            table.writerows(["test" if place < 4 else "train", f"{video}.mp4", caption] for caption in kept)
    return root


def data(root: Path) -> CaptionTable:
    return CaptionTable(root=str(root), frames=2, num_workers=0, batch_size=4)


def test_splits_follow_the_table(root):
    test, train = data(root).read_split("test"), data(root).read_split("train")
    assert len(test.videos) == 4
    assert len(test.texts) == 5
    assert len(train.videos) == len(train.texts) == 16
    assert not {video.video_id for video in test.videos} & {video.video_id for video in train.videos}


def test_an_empty_caption_is_named(root, tmp_path):
    (tmp_path / "caption-table").mkdir()
    table = tmp_path / "caption-table" / "captions.csv"
    table.write_text("split,video,caption\ntrain,video0.mp4, \n")
    with pytest.raises(AnnotationError, match=r"captions\.csv: video0\.mp4, caption 0: the caption is empty"):
        data(tmp_path).read_split("train")


def test_a_method_trains_on_it(root, tmp_path):
    options = [
        f"--config={RECIPES / 'clip4clip.yaml'}", f"--config={HERE / 'caption_table.yaml'}",
        f"--config={RECIPES / 'fixture.yaml'}", f"--data.init_args.root={root}", "--data.init_args.batch_size=4",
        "--data.init_args.num_workers=0", "--data.init_args.frames=2", f"--results.directory={tmp_path}",
        "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=1", "--trainer.accelerator=cpu",
        "--trainer.log_every_n_steps=1", "--trainer.check_val_every_n_epoch=1",
    ]  # fmt: skip
    assert main(["fit", *options]) == 0
    (results,) = tmp_path.glob("*/version_0/results.json")
    found = json.loads(results.read_text())
    assert (found["dataset"], found["texts"], found["videos"]) == ("CaptionTable", 5, 4)
