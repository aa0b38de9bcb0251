"""Several processes train every method exactly as one process does, with whole and with sharded weights."""

import os
import warnings

import pytest
import torch
from gloo import run_processes
from scale_models import BATCH, METHODS, build, pairs, strategies, train
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You defined a .validation_step")]
STEPS = 3
GATHERED = [name for name in METHODS if name != "VideoQA"]  # answering gathers nothing
LOCAL = ["CLIP4Clip", "XCLIP", "UCoFiA", "XPool"]


def train_all(rank: int, world: int) -> dict[str, list]:
    """Losses and weights by what is trained, and how."""
    # Lightning joins the process group that exists and starts no processes of its own.
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = "0"
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    results = {}
    for name in METHODS:
        for strategy, chosen in strategies(name, world).items():
            results[f"{strategy} {name}"] = list(train(build(name), STEPS, rank, world, chosen))
    for name in GATHERED:
        results[f"own-slice {name}"] = list(train(build(name, "own-slice"), 1, rank, world, "ddp", clip=None))
    for name in LOCAL:
        results[f"local {name}"] = list(train(build(name, "local"), STEPS, rank, world, "ddp"))
    return results


@pytest.fixture(scope="module", params=[2, 4])
def results(request) -> list[dict]:
    return run_processes(train_all, request.param, request.param)


@pytest.fixture(scope="module")
def one_process() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    warnings.filterwarnings("ignore", message="You defined a .validation_step")
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    return {name: train(build(name), STEPS) for name in METHODS}


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, tensor in expected.items():
        if "queue" in name:
            continue  # queues hold the same items, in the order in which they were gathered
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{what} {n}: {m}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", METHODS)
def test_losses_and_weights_equal_those_of_one_process(name, strategy, results, one_process):
    expected, before = one_process[name], build(name).state_dict()
    changed = [key for key, tensor in expected[1].items() if key in before and not torch.equal(tensor, before[key])]
    assert len(changed) > 20
    losses = [result[f"{strategy} {name}"][0] for result in results]
    # Answering has no loss over all pairs: each process notes that of its own part.
    assert torch.tensor(losses).mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    if name != "VideoQA":
        assert all(found == pytest.approx(expected[0], rel=1e-6) for found in losses)
    for rank, result in enumerate(results):
        assert_equal_weights(result[f"{strategy} {name}"][1], expected[1], f"{strategy}, process {rank},")


@pytest.mark.parametrize("name", LOCAL)
def test_local_losses_average_to_that_of_one_process_and_train_the_same_weights(name, results, one_process):
    expected = one_process[name]
    losses = torch.tensor([result[f"local {name}"][0] for result in results])
    assert losses.mean(0).tolist() == pytest.approx(expected[0], rel=1e-6)
    assert len(set(losses[:, 0].tolist())) == len(results)  # each process looks at its own rows and columns
    for rank, result in enumerate(results):
        assert_equal_weights(result[f"local {name}"][1], expected[1], f"process {rank},")


def step_of_own_slices(name: str, world: int) -> dict[str, Tensor]:
    """Weights after a step with 1 / W of the gradient that passes the gather, and all of what heads get beside it."""
    method = build(name)
    torch.manual_seed(0)
    encoded = method.pair_features(pairs(BATCH, 0))
    sum(method.losses(encoded.detach()).values()).backward()
    heads = {key: parameter.grad for key, parameter in method.named_parameters() if parameter.grad is not None}
    method.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    encoded = method.pair_features(pairs(BATCH, 0))
    sum(method.losses(encoded).values()).backward()
    weights = dict(method.state_dict())
    for key, parameter in method.named_parameters():
        if parameter.grad is not None:
            beside = heads.get(key, torch.zeros_like(parameter))
            weights[key] = parameter.detach() - 0.1 * (beside + (parameter.grad - beside) / world)
    return weights


@pytest.mark.parametrize("name", GATHERED)
def test_own_slices_give_what_lies_before_the_gather_its_share_and_heads_all_of_the_gradient(name, results):
    world = len(results)
    expected = step_of_own_slices(name, world)
    whole = build(name).state_dict()
    assert not torch.equal(expected["encoder.clip.text_projection"], whole["encoder.clip.text_projection"])
    for rank, result in enumerate(results):
        found = result[f"own-slice {name}"][1]
        assert_equal_weights({k: found[k] for k in expected if k in found}, expected, f"process {rank},")
