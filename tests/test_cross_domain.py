"""A checkpoint trained on one dataset is tested on another one's overlay, with that one's frames and words."""

import json
from pathlib import Path

import pandas as pd
import pytest

from tvr_lightning.cli import main
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("two")
    for dataset in ("msrvtt", "didemo"):
        synthesize(dataset, root, 12, 0, workers=1, progress=False)
    return root


def configs(*names: str) -> list[str]:
    return [f"--config={RECIPES / name}" for name in names]


def options(root: Path, runs: Path) -> list[str]:
    return [
        f"--data.init_args.root={root}", "--data.init_args.batch_size=4", "--data.init_args.num_workers=0",
        "--model.init_args.encoder.init_args.width=64", f"--results.directory={runs}", "--trainer.accelerator=cpu",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(root, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    more = ["--data.init_args.frames=3", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
    more.append("--trainer.log_every_n_steps=1")
    assert main(["fit", *configs("clip4clip.yaml", "fixture.yaml"), *options(root, runs), *more]) == 0
    (path,) = runs.glob("*/version_0/checkpoints/last.ckpt")
    return path


def test_the_result_names_both_datasets_and_uses_the_frames_and_words_of_the_tested_one(
    checkpoint, root, tmp_path, capsys
):
    capsys.readouterr()
    # The overlay comes after fixture.yaml here, so that its frames hold.
    recipes = configs("clip4clip.yaml", "fixture.yaml", "data/didemo.yaml")
    assert main(["test", *recipes, *options(root, tmp_path), f"--ckpt_path={checkpoint}"]) == 0
    assert "trained on synthetic MSR-VTT, tested on synthetic DiDeMo" in " ".join(capsys.readouterr().out.split())
    (path,) = tmp_path.glob("clip4clip-didemo/*/results.json")
    results = json.loads(path.read_text())
    assert (results["trained_on"], results["dataset"]) == ("synthetic MSR-VTT", "synthetic DiDeMo")
    assert results["config"]["data"]["init_args"]["frames"] == 64
    assert results["config"]["data"]["init_args"]["words"] == 64
    table = pd.read_csv(path.with_name("results.csv"))
    assert set(table["trained_on"]) == {"synthetic MSR-VTT"}


def test_the_overlay_alone_is_enough_on_top_of_the_checkpoint(checkpoint, root, tmp_path):
    more = [f"--results.directory={tmp_path}", "--trainer.accelerator=cpu"]
    assert main(["test", *configs("data/didemo.yaml"), f"--ckpt_path={checkpoint}", *more]) == 0
    (path,) = tmp_path.glob("clip4clip-didemo/*/results.json")
    results = json.loads(path.read_text())
    assert (results["trained_on"], results["dataset"]) == ("synthetic MSR-VTT", "synthetic DiDeMo")
    data = results["config"]["data"]["init_args"]
    assert (data["split"], data["frames"], data["words"], data["root"]) == ("lists", 64, 64, str(root))


def test_a_test_on_the_own_dataset_says_nothing_of_another(checkpoint, capsys):
    results = json.loads((checkpoint.parents[1] / "results.json").read_text())
    assert results["trained_on"] == results["dataset"] == "synthetic MSR-VTT"
