"""Four processes train as one does with every `gather`; `test_contract.py` trains every method on two processes."""

import pytest
import torch
from scale_models import ANSWERING, RECIPES, Questions, answering, build, pairs

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
WITHOUT_DROPOUT = {"XPool": "--model.init_args.xpool.dropout=0"}  # processes draw different masks


def made(name, gather="global"):
    """Module and batches."""
    if name == ANSWERING:
        module = answering()
        return module, Questions(module.method, STEPS)
    options = [WITHOUT_DROPOUT[name]] if gather == "local" and name in WITHOUT_DROPOUT else []
    method = build(name, f"--model.init_args.gather={gather}", *options)
    return method, Batches(method, 1 if gather == "own-slice" else STEPS)


def train_all(rank):
    """Losses and weights by strategy or gather and name."""
    results = {}
    for name in WHOLE:
        for strategy, chosen in strategies().items():
            if (name, strategy) == (ANSWERING, "ddp"):  # it does not use all parameters of the retrieval method
                chosen = "ddp_find_unused_parameters_true"
            results[f"{strategy} {name}"] = list(trained(*made(name), strategy=chosen))
    for gather, names in (("own-slice", RECIPES), ("local", LOCAL)):
        for name in names:
            clip = None if gather == "own-slice" else 1.0
            results[f"{gather} {name}"] = list(trained(*made(name, gather), strategy="ddp", gradient_clip_val=clip))
    return results


@pytest.fixture(scope="module")
def results():
    return run_processes(train_all, WORLD)


def assert_equal_weights(found, expected, what):
    for name, tensor in expected.items():
        if "queue" in name:
            continue  # queues contain the same items in the order of gathering
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{what} {n}: {m}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", WHOLE)
def test_losses_and_weights_equal_those_of_one_process(name, strategy, results):
    before = made(name)[0].state_dict()
    expected = trained(*made(name))
    changed = [key for key, tensor in expected[1].items() if key in before and not torch.equal(tensor, before[key])]
    assert len(changed) > 20
    losses = [result[f"{strategy} {name}"][0] for result in results]
    # Question answering has no loss over all pairs, so each process logs the loss of its own part.
    assert torch.tensor(losses).mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    for rank, result in enumerate(results):
        assert_equal_weights(result[f"{strategy} {name}"][1], expected[1], f"{strategy}, process {rank},")


@pytest.mark.parametrize("name", LOCAL)
def test_local_losses_average_to_the_loss_of_one_process_and_train_the_same_weights(name, results):
    expected = trained(*made(name, "local"))
    losses = torch.tensor([result[f"local {name}"][0] for result in results])
    assert losses.mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    assert len(set(losses[:, 0].tolist())) == WORLD  # each process has its own rows and columns
    for rank, result in enumerate(results):
        assert_equal_weights(result[f"local {name}"][1], expected[1], f"process {rank},")


def step_of_own_slices(name):
    """Weights after a step with 1 / W of the gradient through the gather, and all of the heads' other gradient."""
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
            direct = heads.get(key, torch.zeros_like(parameter))
            weights[key] = parameter.detach() - 0.1 * (direct + (parameter.grad - direct) / WORLD)
    return weights


@pytest.mark.parametrize("name", RECIPES)
def test_own_slices_scale_the_gradient_through_the_gather_but_not_that_of_heads(name, results):
    expected = step_of_own_slices(name)
    whole = build(name).state_dict()
    assert not torch.equal(expected["encoder.clip.text_projection"], whole["encoder.clip.text_projection"])
    for rank, result in enumerate(results):
        found = result[f"own-slice {name}"][1]
        assert_equal_weights({k: found[k] for k in expected if k in found}, expected, f"process {rank},")
