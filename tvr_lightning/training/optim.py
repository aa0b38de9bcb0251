"""Optimizer options, parameter groups, and learning rate schedules.

The schedule multiplies each group's learning rate, with one step per optimizer step, so that Lightning saves and
resumes it exactly. The first step has learning rate 0, as released.
"""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from tvr_lightning.errors import UserError
from tvr_lightning.option_types import Count, NotNegative, Options, Positive, Range
from tvr_lightning.training.checkpoints import CheckpointError
from tvr_lightning.training.options import plain_options, value_text
from tvr_lightning.training.released_optimizers import BertAdam, HuggingFaceAdamW

Fraction = Annotated[float, Range(at_least=0, below=1)]
CHANGEABLE = ("schedule", "warmup", "schedule_epochs", "gradient_cache")
"""Options that may change when a training is resumed from a checkpoint, whose optimizer state does not contain them."""


@dataclass
class OptimizerConfig(Options):
    """Optimizer, learning rates and schedule of a recipe; the defaults are those of CLIP4Clip, GARE and TC-MGC.

    Attributes:
        name: `bert-adam` (without bias correction, clips every tensor), `adamw` (torch), or `adamw-hf` (transformers
            up to version 4, used by X-Pool, T-MASS, and GAID).
        lr: peak learning rate of all parameters that are not pretrained, and of what LoRA, Adapter or another
            tuning with `rate: lr` trains.
        encoder_lr: peak learning rate of the encoder without such tuning, and of the logit scale.
        rates: peak learning rates of parameters by patterns of their names, such as `{encoder.*.visual.*: 1.0e-6}`; of
            several matching patterns, the last one counts.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: term added to the root of the running mean of squares.
        warmup: share of the schedule over which the learning rate rises from 0.
        schedule: `warmup-cosine` follows 0.5 (1 + cos(pi x)) in the share x of ALL steps, so that it drops from 1 to
            0.976 when a warmup of 0.1 ends (released BertAdam); `warmup-cosine-shifted` starts its cosine at 1 when the
            warmup ends (GAID, X-Pool, T-MASS); `constant` stays at 1.
        per_tensor_clip: maximum gradient norm of each tensor, in addition to Lightning's clipping of all tensors
            together; None disables it. BertAdam only.
        decay: parameters with weight decay: `released` excludes parameters whose name contains `bias` (the released
            list also names LayerNorm, but no module has that name, so its weights ARE decayed); `all` excludes none
            (GAID); `no-bias-no-norm` excludes all parameters with fewer than two dimensions.
        schedule_epochs: length of the schedule in epochs, if it differs from the length of the run: GARE's released
            code always plans 5, so the cosine rises again in a longer run.
        gradient_cache: number of pairs that are encoded at a time on each device, if its share of a batch does not fit
            in memory; the loss still uses the whole batch (`tvr_lightning.training.gradient_cache`). None encodes all
            at once.
    """

    name: Literal["bert-adam", "adamw", "adamw-hf"] = "bert-adam"
    lr: NotNegative = 1e-4
    encoder_lr: NotNegative = 1e-7
    rates: dict[str, NotNegative] | None = None
    weight_decay: NotNegative = 0.2
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)
    eps: Positive = 1e-6
    warmup: Fraction = 0.1
    schedule: Literal["warmup-cosine", "warmup-cosine-shifted", "constant"] = "warmup-cosine"
    per_tensor_clip: Positive | None = 1.0
    decay: Literal["released", "all", "no-bias-no-norm"] = "released"
    schedule_epochs: Positive | None = None
    gradient_cache: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.betas = (float(self.betas[0]), float(self.betas[1]))
        if self.name != "bert-adam" and self.per_tensor_clip is not None:
            raise UserError(
                f"optimizer.per_tensor_clip is an option of bert-adam. With `name: {self.name}`, set `per_tensor_clip: "
                "null` and clip all gradients together with trainer.gradient_clip_val"
            )


def check_optimizer_options(checkpoint: str, saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse options that differ from those of a checkpoint, whose optimizer state would replace them."""
    defaults = plain_options(OptimizerConfig())
    then, now = (defaults | (options.get("optimizer") or {}) for options in (saved, here))
    changed = [
        f"optimizer.{name} {value_text(then[name])} (here: {value_text(now[name])})"
        for name in defaults
        if name not in CHANGEABLE and then[name] != now[name]
    ]
    if changed:
        raise CheckpointError(
            f"{checkpoint} was trained with {', '.join(changed)}. Resume it with the same optimizer options."
        )


def parameter_groups(module: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Split the trainable parameters by learning rate and decay; the logit scale gets the encoder's learning rate.

    The pretrained part of the module is its attribute `encoder` or `method.encoder`; `tuning` determines its rate.
    Return the non-empty groups with `params`, `lr`, `weight_decay` and `name`, such as `encoder, decayed`; raise a
    UserError if nothing is trained, or a pattern of `rates` matches nothing that is trained.
    """
    patterns = config.rates or {}
    rates = {"method": config.lr, "encoder": config.encoder_lr, "tuning": config.lr, **patterns}
    tuning = getattr(getattr(module, "method", module), "tuning", None)
    encoder = "tuning" if tuning is not None and tuning.rate == "lr" else "encoder"
    groups: dict[tuple[str, bool], list[Tensor]] = {}
    unused = set(patterns)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            pretrained = name.startswith(("encoder.", "method.encoder."))
            part = encoder if pretrained else "encoder" if name.rpartition(".")[2] == "logit_scale" else "method"
            if matching := [pattern for pattern in patterns if fnmatchcase(name, pattern)]:
                part = matching[-1]
                unused -= set(matching)
            decayed = {"all": True, "released": "bias" not in name, "no-bias-no-norm": parameter.ndim >= 2}
            groups.setdefault((part, decayed[config.decay]), []).append(parameter)
    if not groups:
        raise UserError(f"{type(module).__name__} has no trainable parameters. Unfreeze some, or only evaluate it.")
    if unused:
        raise UserError(f"optimizer.rates: no trained parameter matches {', '.join(sorted(unused))}")
    return [
        {
            "params": groups[part, decayed],
            "lr": rates[part],
            "weight_decay": config.weight_decay if decayed else 0.0,
            "name": f"{part}, {'decayed' if decayed else 'not decayed'}",
        }
        for part in rates
        for decayed in (False, True)
        if (part, decayed) in groups
    ]


def schedule_factor(config: OptimizerConfig, step: int, total: float) -> float:
    """Return the learning rate after `step` of `total` optimizer steps, as a share of the peak in [0, 1].

    Only `warmup-cosine` changes after the end: it is periodic, as released, and rises again.
    """
    if config.schedule == "warmup-cosine-shifted":
        warmup = int(config.warmup * total)  # whole steps, as released
        if step < warmup:
            return step / warmup
        return 0.5 * (1.0 + math.cos(math.pi * min((step - warmup) / (total - warmup), 1.0)))
    share = step / total
    if share < config.warmup:
        return share / config.warmup
    return 1.0 if config.schedule == "constant" else 0.5 * (1.0 + math.cos(math.pi * share))


class Schedule(LambdaLR):
    """Schedule whose learning rates always follow from the options, also if a checkpoint has other ones.

    The learning rate of a group that a callback adds during training is its peak.
    """

    @override
    def get_lr(self) -> list[float | Tensor]:
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            self.base_lrs.append(group["lr"])
            self.lr_lambdas.append(self.lr_lambdas[0])
        return super().get_lr()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"base_lrs": self.base_lrs})
        factors = [factor(self.last_epoch) for factor in self.lr_lambdas]
        self._last_lr = [rate * factor for rate, factor in zip(self.base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, total_steps: int, epochs: float | None = None, fused: bool = True
) -> tuple[torch.optim.Optimizer, Schedule]:
    """Build the optimizer of a method, and its schedule, to be stepped once after each optimizer step.

    `total_steps` and `epochs` are those of the run; `epochs` is required with `schedule_epochs`. `fused` permits a
    fused kernel of AdamW.
    """
    if total_steps < 1:
        raise UserError(f"a schedule needs at least one optimizer step, got {total_steps}; check trainer.max_epochs")
    span = float(total_steps)
    if config.schedule_epochs is not None:
        if epochs is None or epochs <= 0:
            raise UserError("optimizer.schedule_epochs needs a run counted in epochs: set trainer.max_epochs")
        span = total_steps / epochs * config.schedule_epochs
    groups = parameter_groups(module, config)
    common: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    optimizer: torch.optim.Optimizer
    if config.name == "bert-adam":
        optimizer = BertAdam(groups, per_tensor_clip=config.per_tensor_clip, **common)
    elif config.name == "adamw-hf":
        optimizer = HuggingFaceAdamW(groups, **common)
    else:
        fused = fused and {parameter.device.type for parameter in module.parameters()} <= {"cpu", "cuda"}
        optimizer = torch.optim.AdamW(groups, fused=fused, foreach=not fused, **common)
    return optimizer, Schedule(optimizer, lambda step: schedule_factor(config, step, span))
