"""Gathering over two devices: the results and their gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tvr_lightning  # noqa: F401  before lightning, which imports torchvision

# isort: split
from lightning.pytorch import LightningModule

from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures
from tvr_lightning.testing import run_processes
from tvr_lightning.training.distributed import gather_objects, gather_record, gather_tensor
from tvr_lightning.training.loss_check import LossCheck, check_weights
from tvr_lightning.training.losses import info_nce


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 5, generator=generator)


def encoder_gradient(rank, mode):
    """Gradient of a shared weight after averaging over processes, as DDP does."""
    text, video = batch()
    world = dist.get_world_size() if dist.is_initialized() else 1
    weight = torch.eye(5).requires_grad_()
    own = slice(rank * 8 // world, (rank + 1) * 8 // world)
    gathered = gather_tensor(text[own] @ weight, mode), gather_tensor(video[own] @ weight, mode)
    info_nce(gathered[0] @ gathered[1].T).backward()
    gradient = weight.grad
    if world > 1:
        dist.all_reduce(gradient)
        gradient /= world
    return gradient


def refusal(rank, part):
    """Return the message about a value that is not finite on the second device; its weight has an empty shard."""
    losses, module, broken = LossCheck(), LightningModule(), math.nan if rank else 1.0
    mesh = init_device_mesh("cpu", (2,))
    module.short = nn.Parameter(distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)]))
    module.long = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    module.long.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    losses.start({"a": torch.tensor(broken if part == "loss" else 1.0)}, [f"video{rank}"])
    if part != "loss":
        (module.long.grad if part == "gradient" else module.long.detach()).to_local().fill_(broken)
    try:
        losses.finish(module, gradients=True)
        check_weights(module, {"long": module.long.to_local()} if rank else {})
    except UserError as error:
        return str(error)


def two_devices(rank):
    """The results of all tests, because processes are slow to start."""
    words = torch.full((2, 3, 4), float(rank))
    record = gather_record(TextFeatures(words[:, 0], words, torch.full((2, 3), bool(rank))))
    result = {mode: encoder_gradient(rank, mode) for mode in ("global", "own-slice", "none")}
    result |= {part: refusal(rank, part) for part in ("loss", "gradient", "weight")}
    return result | {"sentence": record.sentence, "mask": record.word_mask, "objects": gather_objects(f"rank {rank}")}


@pytest.fixture(scope="module")
def results():
    return run_processes(two_devices, 2)


def test_gradients_follow_the_mode_of_gathering(results):
    whole = encoder_gradient(0, "global")
    text, video = batch()
    weight = torch.eye(5).requires_grad_()
    halves = [info_nce((text[half] @ weight) @ (video[half] @ weight).T) for half in (slice(0, 4), slice(4, 8))]
    (sum(halves) / 2).backward()
    for result in results:
        torch.testing.assert_close(result["global"], whole)
        torch.testing.assert_close(result["own-slice"], whole / 2)
        torch.testing.assert_close(result["none"], weight.grad)


def test_records_are_gathered_in_rank_order_and_equal_on_all_devices(results):
    for result in results:
        assert result["sentence"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
        assert result["mask"][:, 0].tolist() == [False, False, True, True]
        assert result["objects"] == ["rank 0", "rank 1"]


def test_a_value_that_is_not_finite_on_one_device_is_reported_on_every_device(results):
    assert "not finite: on another device" in results[0]["loss"]
    assert "a = nan; the batch's videos are video1" in results[1]["loss"]
    for part, message in (("gradient", "not the gradient of {}. The"), ("weight", "the weights {} are not finite")):
        assert message.format("another device") in results[0][part]
        assert message.format("long") in results[1][part]
