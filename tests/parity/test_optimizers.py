"""Our optimizers equal the released ones: bit for bit in float16, to one rounding in float32, to 1e-14 in float64.

In float32, processors differ in the last bit, because some fuse multiplications and additions.
"""

import re

import pytest
import torch
from safetensors import safe_open

from tvr_lightning.training.optim import OptimizerConfig, build_optimizer

TENSORS = ("matrix", "vector", "scalar")
OPTIONS = {
    "bert_adam": {"name": "bert-adam"},
    "adamw_released": {
        "name": "adamw-hf",
        "betas": (0.9, 0.999),
        "per_tensor_clip": None,
        "schedule": "warmup-cosine-shifted",
    },
}
MOMENTS = {"next_m": "mean", "next_v": "square", "exp_avg": "mean", "exp_avg_sq": "square"}


def method_of(values):
    """Return a method whose parameters are all its own, with none of an encoder."""
    module = torch.nn.Module()
    for name, value in values.items():
        module.register_parameter(name, torch.nn.Parameter(value))
    return module


def test_optimizer(optimizer_case):
    options = OPTIONS[optimizer_case.stem.removeprefix("optimizer_")]
    with safe_open(optimizer_case, "pt") as file:
        case = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    wrong, compared = [], 0
    runs = {re.fullmatch(r"expected\.(\w+)\.rms_(.+)\.decay_(.+)\.lr_(.+)\.step_.*", name) for name in case} - {None}
    for dtype, rms, decay, rate in sorted({run.groups() for run in runs}):
        kind = getattr(torch, dtype)
        module = method_of({name: case[f"input.value.{name}"].to(kind, copy=True) for name in TENSORS})
        config = OptimizerConfig(**options, lr=float(rate), weight_decay=float(decay), decay="all")
        optimizer, schedule = build_optimizer(module, config, total_steps=50)
        gradients = {name: case[f"input.gradient.rms_{rms}.{name}"].to(kind) for name in TENSORS}
        for step in range(50):
            for name, parameter in module.named_parameters():
                parameter.grad = gradients[name][step].clone()
            optimizer.step()
            schedule.step()
            for name, parameter in module.named_parameters():
                prefix = f"expected.{dtype}.rms_{rms}"
                ours = {f"{prefix}.decay_{decay}.lr_{rate}.step_{step + 1}.{name}": parameter.detach()}
                state = optimizer.state[parameter]
                ours |= {f"{prefix}.step_{step + 1}.{name}.{key}": state[own] for key, own in MOMENTS.items()}
                for key in ours.keys() & case.keys():
                    compared += 1
                    difference = float((ours[key].double() - case[key].double()).norm())
                    moved = float((case[key] - case[f"input.value.{name}"]).norm())
                    one_rounding = torch.finfo(kind).eps * float(case[key].double().norm())
                    allowed = {torch.float64: 1e-14 * moved, torch.float32: one_rounding}.get(kind, 0.0)
                    if difference > allowed:
                        wrong.append(f"{key}: {difference:.1e}")
    print(f"\n{optimizer_case}: {len(wrong)} of {compared} tensors differ")
    if wrong or not compared:
        pytest.fail(
            f"{optimizer_case}: {len(wrong)} of {compared} tensors differ: {', '.join(wrong[:5])}", pytrace=False
        )
