"""BertAdam against loops, AdamW, schedules, parameter groups, and exact resuming."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.temporal_encoder(self.head(self.encoder(inputs))) * self.temperature.logit_scale).square().sum()


def names_of(method: Method, group: dict) -> set[str]:
    members = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in method.named_parameters() if id(parameter) in members}


def tensors(count=1):
    """`count` times tensors of all shapes."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(), (1,), (5,), (3, 4), (2, 3, 4), (40, 30)] * count
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def set_gradients(parameters, step):
    """Set the gradients of a step: some are far above 1, and some are missing."""
    generator = torch.Generator().manual_seed(step)
    for place, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = 10.0 ** (place % 5 - 3) * gradient if (place + step) % 7 else None


def update_one_by_one(parameter, state, lr, decay, clip, betas=(0.9, 0.98), eps=1e-6):
    """The released update of one tensor."""
    gradient = parameter.grad
    if clip is not None:
        gradient = gradient * min(1.0, clip / (float(gradient.norm()) + 1e-6))
    mean, square = state.setdefault(parameter, [torch.zeros_like(parameter), torch.zeros_like(parameter)])
    mean.copy_(betas[0] * mean + (1 - betas[0]) * gradient)
    square.copy_(betas[1] * square + (1 - betas[1]) * gradient * gradient)
    parameter.data -= lr * (mean / (square.sqrt() + eps) + decay * parameter.data)


@pytest.mark.parametrize(("decay", "clip"), [(0.0, 1.0), (0.2, 0.3), (0.2, None)])
@pytest.mark.parametrize("together", [1, 30, 2**25])
def test_bert_adam_updates_many_tensors_like_one_by_one(together, decay, clip, monkeypatch):
    monkeypatch.setattr(released_optimizers, "TOGETHER", together)
    found, expected, state = tensors(), tensors(), {}
    optimizer = BertAdam(found, weight_decay=decay, per_tensor_clip=clip)
    for step in range(20):
        optimizer.param_groups[0]["lr"] = rate = 0.01 * (step % 4)
        set_gradients(found, step)
        set_gradients(expected, step)
        optimizer.step()
        for one, other in zip(found, expected, strict=True):
            if other.grad is not None:
                assert torch.equal(one.grad, other.grad)
                update_one_by_one(other, state, rate, decay, clip)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_step_calls_the_same_number_of_operators_for_any_number_of_tensors():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += function not in (torch.ops.aten.zeros_like.default, torch.ops.aten.detach.default)
            return function(*args, **(kwargs or {}))

    def calls(count):
        parameters = tensors(count)
        optimizer = BertAdam(parameters)
        set_gradients(parameters, 1)
        optimizer.step()
        with Count() as counted:
            optimizer.step()
        return counted.calls

    assert calls(60) == calls(1) < 25


def test_float16_parameters_have_float16_moments_and_move_farther():
    torch.manual_seed(0)
    weights, gradients = 0.02 * torch.randn(20_000), 1e-4 * torch.randn(200, 20_000)
    moved = {}
    for dtype in (torch.float16, torch.float32):
        start = weights.to(dtype)
        parameter = nn.Parameter(start.clone())
        optimizer = BertAdam([parameter], lr=1e-7, weight_decay=0.0)
        for gradient in gradients:
            parameter.grad = gradient.to(dtype)
            optimizer.step()
        state = optimizer.state[parameter]
        assert parameter.dtype == state["mean"].dtype == state["square"].dtype == dtype
        moved[dtype] = (parameter.detach().double() - start.double()).norm()
    assert state["square"].min() > 0
    assert moved[torch.float16] > 10 * moved[torch.float32]


def test_groups_contain_each_trainable_parameter_with_its_rate_and_decay():
    method = Method()
    groups = {group["name"]: group for group in parameter_groups(method, OptimizerConfig())}
    assert {name: names_of(method, group) for name, group in groups.items()} == {
        "encoder, decayed": {"encoder.0.weight", "encoder.1.weight", "temperature.logit_scale"},
        "encoder, not decayed": {"encoder.0.bias", "encoder.1.bias"},
        "method, decayed": {"head.0.weight", "head.1.weight", "temporal_encoder.weight"},
        "method, not decayed": {"head.0.bias", "head.1.bias"},
    }
    rates = [(group["lr"], group["weight_decay"]) for group in groups.values()]
    assert rates == [(1e-4, 0.0), (1e-4, 0.2), (1e-7, 0.0), (1e-7, 0.2)]


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
        ("warmup-linear", [0.0, 0.5, 0.99, 1.0, 0.5, 0.0, 0.0]),
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
    config = OptimizerConfig(schedule_epochs=5)
    optimizer, scheduler = build_optimizer(Method(), config, total_steps=100, epochs=10)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"] / 1e-4)
        optimizer.step()
        scheduler.step()
    assert rates[0] == 0
    assert rates[50] == pytest.approx(0.0, abs=1e-9)
    assert rates[75] == pytest.approx(0.5)


@pytest.mark.parametrize("config", [OptimizerConfig(), OptimizerConfig(name="adamw", per_tensor_clip=None)])
def test_resuming_from_saved_state_gives_the_same_weights(config, tmp_path):
    def train(method, optimizer, scheduler, steps):
        for step in steps:
            optimizer.zero_grad()
            method(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            scheduler.step()

    def build():
        method = Method()
        return method, *build_optimizer(method, config, total_steps=12)

    through = build()
    train(*through, range(12))
    first, second = build(), build()
    train(*first, range(5))
    torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
    for part, state in zip(second, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*second, range(5, 12))
    through, second = through[0], second[0]
    for name, value in through.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    assert not torch.equal(through.head[0].weight, Method().head[0].weight)


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_is_that_of_torch_with_the_same_groups(fused):
    config = OptimizerConfig(name="adamw", per_tensor_clip=None, eps=1e-7)
    optimizer, _ = build_optimizer(Method(), config, 10, fused=fused)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"] is fused
    assert bool(optimizer.defaults["foreach"]) is not fused
    assert {group["eps"] for group in optimizer.param_groups} == {1e-7}
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-4, 1e-4, 1e-7, 1e-7]


def test_lightning_can_clip_the_gradients_of_adamw_in_mixed_precision():
    method = Method()
    optimizer, _ = build_optimizer(method, OptimizerConfig(name="adamw", per_tensor_clip=None), 10, fused=False)
    trained = [parameter for parameter in method.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, 100.0)
    MixedPrecision("bf16-mixed", "cpu").clip_gradients(optimizer, 1.0)
    assert torch.nn.utils.get_total_norm([parameter.grad for parameter in trained]).item() == pytest.approx(1, rel=1e-4)


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
