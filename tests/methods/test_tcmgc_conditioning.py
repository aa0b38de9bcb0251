"""TC-MGC on the synthetic dataset, compared with mean pooling and with shuffled attention."""

import pytest
import torch
from methods.parts import run

from tvr_lightning.testing.processes import quiet_trainer

pytestmark = pytest.mark.slow
# As in `make demo`, which trains from random weights.
LAMBDA = "--model.init_args.tcmgc.similarity_aggregation.init_args.softmax_lambda=10"
FROM_SCRATCH = ("--model.init_args.tcmgc.attention.dropout=0", LAMBDA)
EPOCHS = ("--trainer.max_epochs=60", "--trainer.check_val_every_n_epoch=60", "--model.init_args.optimizer.lr=1e-4")


@pytest.fixture(scope="module")
def trained(fixture_root, tmp_path_factory):
    return run("fit", ["tcmgc", "fixture"], fixture_root, tmp_path_factory.mktemp("tcmgc"), *FROM_SCRATCH, *EPOCHS)


def test_tcmgc_is_at_most_five_points_worse_than_mean_pooling(fixture_root, trained, tmp_path):
    header = "--model.init_args.clip4clip.similarity_header=MeanP"
    _, pooled = run("fit", ["clip4clip", "fixture"], fixture_root, tmp_path, header, *EPOCHS)
    assert trained[1]["text_to_video"]["R@1"] >= pooled["text_to_video"]["R@1"] - 5


def test_shuffling_the_attention_over_frames_lowers_recall(fixture_root, recipe, trained):
    folder, results = trained
    method, data = recipe("tcmgc", options=FROM_SCRATCH, root=fixture_root)
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    method.load_state_dict(checkpoint["state_dict"])
    attention, generator = method.head.attention, torch.Generator().manual_seed(0)
    weigh = attention._weights

    def shuffled(*given):
        weights = weigh(*given)
        return weights[:, torch.randperm(weights.shape[1], generator=generator)]

    attention._weights = shuffled
    quiet_trainer().test(method, datamodule=data, verbose=False)
    assert method.evaluation.text_to_video["R@1"] < results["text_to_video"]["R@1"]
    assert method.evaluation.sum_of_recalls < results["sum_of_recalls"]
