"""Four processes train as one: question answering, and local losses. `test_contract.py` trains every method on two."""

import pytest
import torch
from scale_models import RECIPES, Questions, answering, build

import tvr_lightning.methods
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.testing import run_processes
from tvr_lightning.testing.processes import Batches, strategies, trained
from tvr_lightning.testing.small import synthetic_data

pytestmark = [pytest.mark.slow]
WORLD = 4
STEPS = 2
CLASSES = {title: getattr(tvr_lightning.methods, title, None) for title in RECIPES}
LOCAL = [title for title, kind in CLASSES.items() if kind and kind.losses is RetrievalModule.losses]


def questions():
    module = answering()
    return module, Questions(module.method, STEPS)


def local(name, root=None):
    options = ["gather=local", "released_devices=null"]
    options += ["xpool.dropout=0"] if name == "XPool" else []  # processes draw different masks
    method = build(name, *(f"--model.init_args.{option}" for option in options), root=root)
    return method, Batches(method, STEPS)


def train_all(rank, root):
    """Losses and weights of question answering by strategy, and of methods with local losses."""
    results = {name: list(trained(*local(name, root), strategy="ddp")) for name in LOCAL}
    # Question answering does not use all parameters of the retrieval method.
    for name, strategy in (strategies() | {"ddp": "ddp_find_unused_parameters_true"}).items():
        results[name] = list(trained(*questions(), strategy=strategy))
    return results


@pytest.fixture(scope="module")
def results():
    return run_processes(train_all, WORLD, synthetic_data())


def assert_equal_weights(results, key, expected):
    for rank, result in enumerate(results):
        for name, tensor in expected.items():
            what = f"{key}, process {rank}, {name}"
            torch.testing.assert_close(result[key][1][name], tensor, rtol=1e-6, atol=1e-9, msg=what)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_question_answering_trains_as_one_process(strategy, results):
    module, data = questions()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    expected = trained(module, data)
    changed = [key for key, tensor in expected[1].items() if key in before and not torch.equal(tensor, before[key])]
    assert len(changed) > 20
    # It has no loss over all pairs, so each process logs the loss of its part.
    losses = [result[strategy][0] for result in results]
    assert torch.tensor(losses).mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    assert_equal_weights(results, strategy, expected[1])


@pytest.mark.parametrize("name", LOCAL)
def test_local_losses_average_to_the_loss_of_one_process_and_train_the_same_weights(name, results):
    expected = trained(*local(name))
    losses = torch.tensor([result[name][0] for result in results])
    assert losses.mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    assert len(set(losses[:, 0].tolist())) == WORLD  # each process has its own rows and columns
    assert_equal_weights(results, name, expected[1])
