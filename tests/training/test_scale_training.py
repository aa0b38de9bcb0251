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


def made(name, root, gather="global"):
    """Module and batches."""
    if name == ANSWERING:
        module = answering()
        return module, Questions(module.method, STEPS)
    options = [WITHOUT_DROPOUT[name]] if gather == "local" and name in WITHOUT_DROPOUT else []
    options += [f"--model.init_args.gather={gather}", "--model.init_args.released_devices=null"]
    method = build(name, *options, root=root)
    return method, Batches(method, 1 if gather == "own-slice" else STEPS)


def train_all(rank, root):
    """Losses and weights by strategy or gather and name."""
    results = {}
    for name in WHOLE:
        for strategy, chosen in strategies().items():
            if (name, strategy) == (ANSWERING, "ddp"):  # it does not use all parameters of the retrieval method
                chosen = "ddp_find_unused_parameters_true"
            results[f"{strategy} {name}"] = list(trained(*made(name, root), strategy=chosen))
    for gather, names, clip in (("own-slice", RECIPES, None), ("local", LOCAL, 1.0)):
        for name in names:
            made_for = made(name, root, gather)
            results[f"{gather} {name}"] = list(trained(*made_for, strategy="ddp", gradient_clip_val=clip))
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
            if "queue" not in name:  # queues contain the same items in the order of gathering
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


@pytest.mark.parametrize("name", RECIPES)
def test_own_slices_scale_the_gradient_through_the_gather_but_not_that_of_heads(name, root, results):
    """A step uses 1 / W of the gradient through the gather, and all of the heads' other gradient."""
    method = build(name, root=root)
    torch.manual_seed(0)
    encoded = method.pair_features(pairs(method))
    sum(method.losses(encoded.detach()).values()).backward()
    heads = {key: parameter.grad for key, parameter in method.named_parameters() if parameter.grad is not None}
    method.zero_grad(set_to_none=True)
    encoded = method.pair_features(pairs(method))
    sum(method.losses(encoded).values()).backward()
    expected = {}
    for key, parameter in method.named_parameters():
        direct = heads.get(key, torch.zeros_like(parameter))
        through = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad - direct
        expected[key] = parameter.detach() - 0.1 * (direct + through / WORLD)
    projection = "encoder.clip.text_projection"
    assert not torch.equal(expected[projection], method.state_dict()[projection])
    assert_equal_weights(results, f"own-slice {name}", expected)
