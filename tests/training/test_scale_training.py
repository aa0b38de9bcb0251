"""Four processes train as one does; `test_contract.py` trains every method on two processes."""

import pytest
import torch
from scale_models import ANSWERING, RECIPES, Questions, answering, build

import tvr_lightning.methods
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.testing import run_processes
from tvr_lightning.testing.processes import Batches, strategies, trained

pytestmark = [pytest.mark.slow]
WORLD = 4
STEPS = 2
WHOLE = ["CLIP4Clip", ANSWERING]
CLASSES = {title: getattr(tvr_lightning.methods, title, None) for title in RECIPES}
LOCAL = [title for title, kind in CLASSES.items() if kind and kind.losses is RetrievalModule.losses]


def made(name, root, gather="global"):
    """Module and batches."""
    if name == ANSWERING:
        module = answering()
        return module, Questions(module.method, STEPS)
    options = [f"gather={gather}", "released_devices=null"]
    options += ["xpool.dropout=0"] if name == "XPool" else []  # processes draw different masks
    method = build(name, *(f"--model.init_args.{option}" for option in options), root=root)
    return method, Batches(method, STEPS)


def train_all(rank, root):
    """Losses and weights by strategy or `local`, and name."""
    results = {}
    for name in WHOLE:
        for strategy, chosen in strategies().items():
            if (name, strategy) == (ANSWERING, "ddp"):  # it does not use all parameters of the retrieval method
                chosen = "ddp_find_unused_parameters_true"
            results[f"{strategy} {name}"] = list(trained(*made(name, root), strategy=chosen))
    for name in LOCAL:
        results[f"local {name}"] = list(trained(*made(name, root, "local"), strategy="ddp"))
    return results


@pytest.fixture(scope="module")
def root(msrvtt):
    return str(msrvtt)


@pytest.fixture(scope="module")
def results(root):
    return run_processes(train_all, WORLD, root)


def assert_equal_weights(results, key, expected):
    for rank, result in enumerate(results):
        for name, tensor in expected.items():
            what = f"{key}, process {rank}, {name}"
            torch.testing.assert_close(result[key][1][name], tensor, rtol=1e-6, atol=1e-9, msg=what)


@pytest.mark.parametrize("name", WHOLE)
def test_losses_and_weights_equal_those_of_one_process(name, root, results):
    module, data = made(name, root)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    expected = trained(module, data)
    changed = [key for key, tensor in expected[1].items() if key in before and not torch.equal(tensor, before[key])]
    assert len(changed) > 20
    for strategy in ("ddp", "fsdp2"):
        losses = [result[f"{strategy} {name}"][0] for result in results]
        # Question answering has no loss over all pairs, so each process logs the loss of its part.
        assert torch.tensor(losses).mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
        assert_equal_weights(results, f"{strategy} {name}", expected[1])


@pytest.mark.parametrize("name", LOCAL)
def test_local_losses_average_to_the_loss_of_one_process_and_train_the_same_weights(name, root, results):
    expected = trained(*made(name, root, "local"))
    losses = torch.tensor([result[f"local {name}"][0] for result in results])
    assert losses.mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    assert len(set(losses[:, 0].tolist())) == WORLD  # each process has its own rows and columns
    assert_equal_weights(results, f"local {name}", expected[1])
