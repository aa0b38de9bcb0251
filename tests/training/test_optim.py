"""BertAdam tensor by tensor, AdamW, schedules, and parameter groups."""

import pytest
import torch
from parity.restated import released_step
from torch import nn

from tvr_lightning.errors import UserError
from tvr_lightning.training import released_optimizers
from tvr_lightning.training.optim import OptimizerConfig, build_optimizer, parameter_groups, schedule_factor
from tvr_lightning.training.released_optimizers import BertAdam


class Method(nn.Module):
    """An encoder with a norm and a frozen layer, a head, and a logit scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self.encoder[2].requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        self.temporal_encoder = nn.Linear(3, 3, bias=False)
        self.temperature = nn.Module()
        self.temperature.logit_scale = nn.Parameter(torch.ones(1))


def names_of(method: Method, group: dict) -> set[str]:
    members = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in method.named_parameters() if id(parameter) in members}


def tensors(count=1):
    generator = torch.Generator().manual_seed(4)
    shapes = [(), (1,), (5,), (3, 4), (2, 3, 4), (40, 30)] * count
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def set_gradients(parameters, step):
    """Some gradients are far above 1, and some are missing."""
    generator = torch.Generator().manual_seed(step)
    for place, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = 10.0 ** (place % 5 - 3) * gradient if (place + step) % 7 else None


@pytest.mark.parametrize(("decay", "clip"), [(0.0, 1.0), (0.2, 0.3), (0.2, None)])
@pytest.mark.parametrize("together", [1, 30, 2**25])
def test_bert_adam_updates_many_tensors_like_one_by_one(together, decay, clip, monkeypatch):
    monkeypatch.setattr(released_optimizers, "TOGETHER", together)
    found, expected = tensors(), [value.detach() for value in tensors()]
    moments = [torch.zeros(2, *value.shape, dtype=value.dtype) for value in expected]
    optimizer = BertAdam(found, weight_decay=decay, per_tensor_clip=clip)
    (group,) = optimizer.param_groups
    for step in range(20):
        group["lr"] = 0.01 * (step % 4)
        set_gradients(found, step)
        set_gradients(expected, step)
        optimizer.step()
        for one, other, state in zip(found, expected, moments, strict=True):
            if other.grad is not None:
                assert torch.equal(one.grad, other.grad)
                released_step("bert_adam", other.grad, other, *state, group, step)
    torch.testing.assert_close([value.detach() for value in found], expected, rtol=1e-9, atol=1e-12)


def test_rates_of_patterns_override_those_of_the_parts():
    method = Method()
    config = OptimizerConfig(lr=1.0, encoder_lr=0.1, rates={"encoder.*": 0.2, "encoder.1.*": 0.3, "*scale": 0.0})
    found = {n: group["lr"] for group in parameter_groups(method, config) for n in names_of(method, group)}
    first = {"encoder.0.weight": 0.2, "encoder.0.bias": 0.2, "encoder.1.weight": 0.3, "encoder.1.bias": 0.3}
    assert found == dict.fromkeys(found, 1.0) | first | {"temperature.logit_scale": 0.0}
    with pytest.raises(UserError, match=r"rates: no trained parameter matches encoder\.2\.\*"):
        parameter_groups(method, OptimizerConfig(rates={"encoder.2.*": 0.1, "head.*": 1.0}))


def test_decay_may_exclude_biases_and_norms_or_nothing():
    assert all(group["weight_decay"] for group in parameter_groups(Method(), OptimizerConfig(decay="all")))
    method = Method()
    groups = parameter_groups(method, OptimizerConfig(decay="no-bias-no-norm"))
    decayed = {name for group in groups if group["weight_decay"] for name in names_of(method, group)}
    assert decayed == {"encoder.0.weight", "head.0.weight", "temporal_encoder.weight"}


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        # x = 0, .05, just below .1, .1, .55, 1, 1.5
        ("warmup-cosine", [0.0, 0.5, 0.99, 0.9755283, 0.4217828, 0.0, 0.5]),
        ("warmup-cosine-shifted", [0.0, 0.5, 0.99, 1.0, 0.5, 0.0, 0.0]),
        ("constant", [0.0, 0.5, 0.99, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules_have_these_factors(schedule, values):
    config = OptimizerConfig(schedule=schedule)
    steps = [0, 50, 99, 100, 550, 1000, 1500]
    assert [schedule_factor(config, step, 1000) for step in steps] == pytest.approx(values, abs=1e-6)
    # Without warmup, the first step has the full rate.
    assert schedule_factor(OptimizerConfig(warmup=0.0, schedule=schedule), 0, 100) == 1.0


def test_a_schedule_of_fewer_epochs_than_the_run_rises_again():
    _, scheduler = build_optimizer(Method(), OptimizerConfig(schedule_epochs=5), total_steps=100, epochs=10)
    assert [scheduler.lr_lambdas[0](step) for step in (0, 50, 75)] == pytest.approx([0.0, 0.0, 0.5])


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_that_of_torch_with_the_same_groups(fused):
    config = OptimizerConfig(name="adamw", per_tensor_clip=None, eps=1e-7)
    optimizer, _ = build_optimizer(Method(), config, 10, fused=fused)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"] is fused
    assert bool(optimizer.defaults["foreach"]) is not fused
    assert {group["eps"] for group in optimizer.param_groups} == {1e-7}
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-4, 1e-4, 1e-7, 1e-7]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.2, 0.0, 0.2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "OptimizerConfig.lr"),
        ({"betas": (0.9, 1.0)}, "OptimizerConfig.betas"),
        ({"warmup": 1.0}, "OptimizerConfig.warmup"),
        ({"per_tensor_clip": 0.0}, "OptimizerConfig.per_tensor_clip"),
        ({"name": "adamw"}, "per_tensor_clip: null"),
    ],
)
def test_bad_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_an_optimizer_needs_a_schedule_and_parameters():
    with pytest.raises(ValueError, match=r"trainer\.max_epochs"):
        build_optimizer(Method(), OptimizerConfig(schedule_epochs=5), total_steps=100)
    with pytest.raises(ValueError, match="at least one optimizer step"):
        build_optimizer(Method(), OptimizerConfig(), total_steps=0)
    with pytest.raises(ValueError, match="Method has no trainable parameter"):
        parameter_groups(Method().requires_grad_(False), OptimizerConfig())
