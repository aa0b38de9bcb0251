"""A checkpoint trained on one dataset is tested on another one's overlay, with that one's frames and words."""

import json

import pandas as pd
from small_run import small_run

from tvr_lightning.cli import main

DIDEMO = ("synthetic MSR-VTT", "synthetic DiDeMo")


def test_a_checkpoint_is_tested_with_the_overlay_of_another_dataset(synthetic, tmp_path, capsys):
    root = tmp_path / "data"
    root.mkdir()
    for dataset in ("msrvtt", "didemo"):
        (root / dataset).symlink_to(synthetic(dataset) / dataset)
    options = small_run(root, tmp_path / "runs", "--trainer.max_epochs=1")
    assert main(["fit", *options]) == 0
    (checkpoint,) = (tmp_path / "runs").glob("*/version_0/checkpoints/last.ckpt")
    results = json.loads((checkpoint.parents[1] / "results.json").read_text())
    assert results["trained_on"] == results["dataset"] == "synthetic MSR-VTT"
    capsys.readouterr()

    for name, recipe in (
        ("all", [option for option in options if "data.init_args.frames" not in option]),
        ("overlay", ["--trainer.accelerator=cpu"]),  # which alone is enough on top of the checkpoint
    ):
        runs = f"--results.directory={tmp_path / name}"
        assert main(["test", *recipe, "--config=data/didemo", f"--ckpt_path={checkpoint}", runs]) == 0
        assert "trained on synthetic MSR-VTT, tested on synthetic DiDeMo" in " ".join(capsys.readouterr().out.split())
        (path,) = (tmp_path / name).glob("clip4clip-didemo/*/results.json")
        results = json.loads(path.read_text())
        assert (results["trained_on"], results["dataset"]) == DIDEMO
        data = results["config"]["data"]["init_args"]
        assert (data["split"], data["frames"], data["words"], data["root"]) == ("lists", 64, 64, str(root))
        assert set(pd.read_csv(path.with_name("results.csv"))["trained_on"]) == {"synthetic MSR-VTT"}
