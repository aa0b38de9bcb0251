"""Several processes train as one does, whatever is gathered; `tests/test_contract.py` has every method on two."""

import pytest
import torch
from scale_models import ANSWERING, RECIPES, Questions, answering, build, pairs
from torch import Tensor

import tvr_lightning.methods
from tvr_lightning.methods.base import RetrievalModule
from tvr_lightning.testing import run_processes
from tvr_lightning.testing.processes import Batches, strategies, trained

pytestmark = [pytest.mark.slow]
STEPS = 3
WHOLE = ["CLIP4Clip", ANSWERING]  # one of each kind, on more processes than the contract has
CLASSES = {title: getattr(tvr_lightning.methods, title, None) for title in RECIPES}
LOCAL = [title for title, kind in CLASSES.items() if kind and kind.losses is RetrievalModule.losses]
WITHOUT_DROPOUT = {"XPool": "--model.init_args.xpool.dropout=0"}  # of vectors that no two processes share


def made(name: str, gather: str = "global") -> tuple:
    """Module and batches."""
    if name == ANSWERING:
        module = answering()
        return module, Questions(module.method, STEPS)
    options = [WITHOUT_DROPOUT[name]] if gather == "local" and name in WITHOUT_DROPOUT else []
    method = build(name, f"--model.init_args.gather={gather}", *options)
    return method, Batches(method, 1 if gather == "own-slice" else STEPS)


def train_all(rank: int) -> dict[str, list]:
    """Losses and weights by what is trained, and how."""
    results = {}
    for name in WHOLE:
        for strategy, chosen in strategies().items():
            if (name, strategy) == (ANSWERING, "ddp"):  # answering leaves what only scores pairs without a gradient
                chosen = "ddp_find_unused_parameters_true"
            results[f"{strategy} {name}"] = list(trained(*made(name), strategy=chosen))
    for gather, names in (("own-slice", RECIPES), ("local", LOCAL)):
        for name in names:
            clip = None if gather == "own-slice" else 1.0
            results[f"{gather} {name}"] = list(trained(*made(name, gather), strategy="ddp", gradient_clip_val=clip))
    return results


@pytest.fixture(scope="module", params=[2, 4])
def results(request) -> list[dict]:
    return run_processes(train_all, request.param)


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, tensor in expected.items():
        if "queue" in name:
            continue  # queues hold the same items, in the order in which they were gathered
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{what} {n}: {m}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", WHOLE)
def test_losses_and_weights_equal_those_of_one_process(name, strategy, results):
    before = made(name)[0].state_dict()
    expected = trained(*made(name))
    changed = [key for key, tensor in expected[1].items() if key in before and not torch.equal(tensor, before[key])]
    assert len(changed) > 20
    losses = [result[f"{strategy} {name}"][0] for result in results]
    # Answering has no loss over all pairs: each process notes that of its own part.
    assert torch.tensor(losses).mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    for rank, result in enumerate(results):
        assert_equal_weights(result[f"{strategy} {name}"][1], expected[1], f"{strategy}, process {rank},")


@pytest.mark.parametrize("name", LOCAL)
def test_local_losses_average_to_that_of_one_process_and_train_the_same_weights(name, results):
    expected = trained(*made(name, "local"))
    losses = torch.tensor([result[f"local {name}"][0] for result in results])
    assert losses.mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    assert len(set(losses[:, 0].tolist())) == len(results)  # each process looks at its own rows and columns
    for rank, result in enumerate(results):
        assert_equal_weights(result[f"local {name}"][1], expected[1], f"process {rank},")


def step_of_own_slices(name: str, world: int) -> dict[str, Tensor]:
    """Weights after a step with 1 / W of the gradient that passes the gather, and all of what heads get beside it."""
    method = build(name)
    torch.manual_seed(0)
    encoded = method.pair_features(pairs(method))
    sum(method.losses(encoded.detach()).values()).backward()
    heads = {key: parameter.grad for key, parameter in method.named_parameters() if parameter.grad is not None}
    method.zero_grad(set_to_none=True)
    encoded = method.pair_features(pairs(method))
    sum(method.losses(encoded).values()).backward()
    weights = dict(method.state_dict())
    for key, parameter in method.named_parameters():
        if parameter.grad is not None:
            beside = heads.get(key, torch.zeros_like(parameter))
            weights[key] = parameter.detach() - 0.1 * (beside + (parameter.grad - beside) / world)
    return weights


@pytest.mark.parametrize("name", RECIPES)
def test_own_slices_give_what_lies_before_the_gather_its_share_and_heads_all_of_the_gradient(name, results):
    world = len(results)
    expected = step_of_own_slices(name, world)
    whole = build(name).state_dict()
    assert not torch.equal(expected["encoder.clip.text_projection"], whole["encoder.clip.text_projection"])
    for rank, result in enumerate(results):
        found = result[f"own-slice {name}"][1]
        assert_equal_weights({k: found[k] for k in expected if k in found}, expected, f"process {rank},")
