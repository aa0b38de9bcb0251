"""On the synthetic dataset TC-MGC keeps up with mean pooling, and shuffling its attention over frames hurts."""

import pytest
import torch
from lightning.pytorch import Trainer
from methods.parts import run

pytestmark = pytest.mark.slow
# As `make demo` trains from random weights: see the Makefile.
LAMBDA = "--model.init_args.tcmgc.similarity_aggregation.init_args.softmax_lambda=10"
FROM_SCRATCH = ("--model.init_args.tcmgc.attention.dropout=0", LAMBDA)
EPOCHS = ("--trainer.max_epochs=60", "--trainer.check_val_every_n_epoch=60", "--model.init_args.optimizer.lr=1e-4")


@pytest.fixture(scope="module")
def trained(fixture_root, tmp_path_factory):
    return run("fit", ["tcmgc", "fixture"], fixture_root, tmp_path_factory.mktemp("tcmgc"), *FROM_SCRATCH, *EPOCHS)


def test_tcmgc_keeps_up_with_mean_pooling(fixture_root, trained, tmp_path):
    header = "--model.init_args.clip4clip.similarity_header=MeanP"
    _, pooled = run("fit", ["clip4clip", "fixture"], fixture_root, tmp_path, header, *EPOCHS)
    assert trained[1]["text_to_video"]["R@1"] >= pooled["text_to_video"]["R@1"] - 5


def test_shuffling_the_attention_over_frames_lowers_recall(fixture_root, recipe, trained):
    folder, results = trained
    method, data = recipe("tcmgc", options=[*FROM_SCRATCH, f"--data.init_args.root={fixture_root}"])
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    method.load_state_dict(checkpoint["state_dict"])
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
