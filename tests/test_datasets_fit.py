"""A method trains and is selected on the test split of the synthetic version of every dataset, as released."""

import json

import pytest
from small_run import small_run

from tvr_lightning.cli import main

DATASETS = ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]
SLOW = pytest.mark.slow


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
