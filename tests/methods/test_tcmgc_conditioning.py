"""On the synthetic dataset TC-MGC keeps up with mean pooling, and shuffling its attention over frames hurts."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from tvr_lightning.cli import main
from tvr_lightning.config.recipe import from_recipe
from tvr_lightning.synthetic import synthesize

pytestmark = pytest.mark.slow
RECIPES = Path(__file__).parents[2] / "recipes"
LAMBDA = "similarity_aggregation.init_args.softmax_lambda"
# As `make demo` trains from random weights: see the Makefile.
TCMGC = ["--config", str(RECIPES / "tcmgc.yaml"), "--config", str(RECIPES / "fixture.yaml")]
FROM_SCRATCH = ["--model.init_args.tcmgc.attention.dropout=0", f"--model.init_args.tcmgc.{LAMBDA}=10"]
LEARNING_RATE = "--model.init_args.optimizer.lr=1e-4"
MEAN_POOLING = ["--config", str(RECIPES / "clip4clip.yaml"), "--config", str(RECIPES / "fixture.yaml")]
HEADER = ["--model.init_args.clip4clip.similarity_header=MeanP"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    synthesize("msrvtt", folder, 500, 0, progress=False)
    return folder


def run(root: Path, runs: Path, options: list[str]) -> tuple[dict, Path]:
    more = [f"--data.init_args.root={root}", f"--results.directory={runs}", LEARNING_RATE, "--trainer.max_epochs=60"]
    assert main(["fit", *options, *more, "--trainer.check_val_every_n_epoch=60"]) == 0
    (path,) = runs.glob("*/version_0/results.json")
    return json.loads(path.read_text()), path.parent / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def trained(root, tmp_path_factory) -> tuple[dict, Path]:
    return run(root, tmp_path_factory.mktemp("tcmgc"), TCMGC + FROM_SCRATCH)


def test_tcmgc_keeps_up_with_mean_pooling(root, trained, tmp_path):
    pooled, _ = run(root, tmp_path, MEAN_POOLING + HEADER)
    assert trained[0]["text_to_video"]["R@1"] >= pooled["text_to_video"]["R@1"] - 5


def test_shuffling_the_attention_over_frames_lowers_recall(root, trained):
    results, checkpoint = trained
    paths = [str(RECIPES / "tcmgc.yaml"), str(RECIPES / "fixture.yaml")]
    method, data = from_recipe(paths, [*FROM_SCRATCH, f"--data.init_args.root={root}"])
    method.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    attention, generator = method.head.attention, torch.Generator().manual_seed(0)
    weigh = attention._weights

    def shuffled(*given):
        weights = weigh(*given)
        return weights[:, torch.randperm(weights.shape[1], generator=generator)]

    attention._weights = shuffled
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, use_distributed_sampler=False)
    trainer.test(method, datamodule=data, verbose=False)
    assert method.evaluation.text_to_video["R@1"] < results["text_to_video"]["R@1"]
    assert method.evaluation.sum_of_recalls < results["sum_of_recalls"]
