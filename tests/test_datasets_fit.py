"""Every dataset's synthetic fixture trains and evaluates with its overlay, and names its protocol."""

import json
from pathlib import Path

import pytest

from tvr_lightning.cli import main
from tvr_lightning.synthetic import synthesize

RECIPES = Path(__file__).parent.parent / "recipes"
DATASETS = ["msrvtt", "didemo", "lsmdc", "activitynet", "vatex", "msvd", "charades"]


@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS)
def test_fit_and_test_with_the_datasets_overlay(dataset, tmp_path, capsys):
    synthesize(dataset, tmp_path / "data", 16, 0, workers=1, progress=False)
    options = [
        f"--config={RECIPES / 'tcmgc.yaml'}", f"--config={RECIPES / 'data' / dataset}.yaml",
        f"--config={RECIPES / 'fixture.yaml'}", f"--data.init_args.root={tmp_path / 'data'}",
        f"--results.directory={tmp_path / 'runs'}", "--data.init_args.batch_size=4", "--data.init_args.num_workers=0",
        "--data.init_args.frames=4", "--data.init_args.captions_per_epoch=one", "--trainer.accelerator=cpu",
        "--model.init_args.encoder.init_args.width=64", "--trainer.max_epochs=1", "--trainer.limit_train_batches=2",
        "--trainer.check_val_every_n_epoch=1", "--trainer.log_every_n_steps=1",
    ]  # fmt: skip
    assert main(["fit", *options]) == 0
    (checkpoint,) = (tmp_path / "runs").glob("*/version_0/checkpoints/last.ckpt")
    assert main(["test", *options, f"--ckpt_path={checkpoint}"]) == 0
    (path,) = (tmp_path / "runs").glob("*/version_1/results.json")
    results = json.loads(path.read_text())
    assert results["protocol"]
    assert results["partial"] is False
    said = " ".join(capsys.readouterr().out.split())
    assert results["protocol"].split(",")[0].split()[0] in said
