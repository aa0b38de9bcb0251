"""Our optimizers equal the released ones bit for bit, in float64 to 1e-14 of the movement.

The released steps are restated here with one operation per line, because recorded float32 values have the square roots
of the CPU that recorded them: Intel's MKL, which torch calls, rounds about one in 200 differently on another one.
The recorded values are therefore compared to one rounding in float32, and bit for bit in float16.
"""

import re

import torch
from parity.case import read
from parity.restated import released_step

from tvr_lightning.training.optim import OptimizerConfig, build_optimizer

TENSORS = ("matrix", "vector", "scalar")
ADAMW = {"name": "adamw-hf", "betas": (0.9, 0.999), "per_tensor_clip": None, "schedule": "warmup-cosine-shifted"}
OPTIONS = {"bert_adam": {"name": "bert-adam"}, "adamw_released": ADAMW}
MOMENTS = {"next_m": "mean", "next_v": "square", "exp_avg": "mean", "exp_avg_sq": "square"}


def test_optimizer(optimizer_case):
    options = OPTIONS[optimizer_case.stem.removeprefix("optimizer_")]
    case, _ = read(optimizer_case)
    wrong, compared = [], 0
    runs = {re.fullmatch(r"expected\.(\w+)\.rms_(.+)\.decay_(.+)\.lr_(.+)\.step_.*", name) for name in case} - {None}
    for dtype, rms, decay, rate in sorted({run.groups() for run in runs}):
        kind = getattr(torch, dtype)
        values = {name: case[f"input.value.{name}"].to(kind, copy=True) for name in TENSORS}
        module = torch.nn.ParameterDict(values)
        config = OptimizerConfig(**options, lr=float(rate), weight_decay=float(decay), decay="all")
        optimizer, schedule = build_optimizer(module, config, total_steps=50)
        restated = {
            name: (parameter.detach().clone(), *torch.zeros(2, *parameter.shape, dtype=kind))
            for name, parameter in module.named_parameters()
        }
        gradients = {name: case[f"input.gradient.rms_{rms}.{name}"].to(kind) for name in TENSORS}
        for step in range(50):
            for name, parameter in module.named_parameters():
                parameter.grad = gradients[name][step].clone()
                group = optimizer.param_groups[0]
                released_step(optimizer_case.stem, gradients[name][step], *restated[name], group, step + 1)
            optimizer.step()
            schedule.step()
            for name, parameter in module.named_parameters():
                prefix = f"expected.{dtype}.rms_{rms}"
                ours = {f"{prefix}.decay_{decay}.lr_{rate}.step_{step + 1}.{name}": parameter.detach()}
                state = optimizer.state[parameter]
                for own, other in zip((parameter, state["mean"], state["square"]), restated[name], strict=True):
                    assert kind == torch.float64 or torch.equal(own.detach(), other), (name, step + 1, dtype)
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
    assert compared
    assert not wrong, ", ".join(wrong[:5])
