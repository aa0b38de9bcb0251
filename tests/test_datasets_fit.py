"""A method trains and is tested on the synthetic version of every dataset, with the dataset's overlay."""

import json

import pytest
from small_run import small_run

from tvr_lightning.cli import main

DATASETS = ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]


@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS)
def test_fit_and_test_with_the_overlay_of_a_dataset(dataset, synthetic, tmp_path, capsys):
    overlays = (f"--config=data/{dataset}", "--config=fixture", "--data.init_args.captions_per_epoch=one")
    options = small_run(synthetic(dataset), tmp_path, *overlays, "--data.init_args.frames=4", recipe="tcmgc")
    assert main(["fit", *options, "--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]) == 0
    (checkpoint,) = tmp_path.glob("*/version_0/checkpoints/last.ckpt")
    assert main(["test", *options, f"--ckpt_path={checkpoint}"]) == 0
    (path,) = tmp_path.glob("*/version_1/results.json")
    results = json.loads(path.read_text())
    assert results["partial"] is False
    assert results["protocol"].split(",")[0].split()[0] in " ".join(capsys.readouterr().out.split())
