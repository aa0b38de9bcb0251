"""Optimizers of the released codes that torch does not provide: BertAdam, and AdamW of early transformers versions.

Each operation of an update is computed for many tensors by one call (`torch._foreach_*`): a ViT-B/32 has 370 tensors,
and most of them take less time to update than to launch a kernel for. No operation synchronizes with the device. State
and update have the parameter's own dtype. Multiplications with Python numbers are out of place, because torch's
in-place `_foreach_mul_` first rounds the number to the tensors' dtype: 1e-7 becomes 1.19e-7 in float16.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

TOGETHER = 2**25  # maximum number of elements updated together, of which the update needs three copies of 128 MiB

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
State = dict[str, Any]


class ReleasedOptimizer(torch.optim.Optimizer, ABC):
    """Base class of optimizers with AdamW's options that update lists of tensors (any shape) together."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.2,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the loss of the closure if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in self._together(group["params"]):
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state.update(mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter), step=0)
                    state["step"] += 1
                gradients = [parameter.grad for parameter in parameters]
                self._update(parameters, gradients, [self.state[parameter] for parameter in parameters], group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], gradients: Any, states: list[State], group: dict[str, Any]) -> None:
        """Update tensors of one device, dtype and number of steps."""

    def _together(self, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield lists of the parameters with a gradient, each with up to `TOGETHER` elements or one tensor."""
        lists: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            key = (parameter.device, parameter.dtype, self.state[parameter].get("step", 0))
            pending = lists.setdefault(key, [])
            if pending and sum(map(Tensor.numel, pending)) + parameter.numel() > TOGETHER:
                yield lists.pop(key)
                pending = lists.setdefault(key, [])
            pending.append(parameter)
        yield from lists.values()


def _mean_and_root(gradients: Any, states: list[State], group: dict[str, Any]) -> tuple[Any, Any]:
    """Update the running means of the gradients and of their squares; return the first, and sqrt(squares) + eps."""
    first, second = group["betas"]
    means = torch._foreach_mul([state["mean"] for state in states], first)
    torch._foreach_add_(means, gradients, alpha=1 - first)
    squares = torch._foreach_mul([state["square"] for state in states], second)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
    for state, mean, square in zip(states, means, squares, strict=True):
        state.update(mean=mean, square=square)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, group["eps"])
    return means, roots


class BertAdam(ReleasedOptimizer):
    """Adam without bias correction, with decay in the update and clipping per tensor.

    The optimizer of CLIP4Clip's modules/optimization.py, which GARE, TC-MGC, X-CLIP, DRL and UCoFiA share. For each
    tensor p:

        g <- g min(1, clip / (|g| + 1e-6));  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g g
        p <- p - lr (m / (sqrt(v) + eps) + decay p)

    In float16, v underflows to 0 for gradients below about 1.2e-3, so that the step becomes lr m / eps: momentum SGD
    with the rate lr (1 - b1) / eps. This is how the released codes train CLIP (benchmarks/results/precision.md).

    `per_tensor_clip` is the maximum norm of each tensor's gradient; None disables clipping.
    """

    def __init__(self, params: Parameters, *, per_tensor_clip: float | None = 1.0, **options: Any) -> None:
        super().__init__(params, per_tensor_clip=per_tensor_clip, **options)

    @override
    def _update(self, parameters: list[Tensor], gradients: Any, states: list[State], group: dict[str, Any]) -> None:
        if group["per_tensor_clip"] is not None:
            norms = torch.stack(torch._foreach_norm(gradients))
            clips = (group["per_tensor_clip"] / (norms + 1e-6)).clamp(max=1.0)
            gradients = torch._foreach_mul(gradients, clips.unbind())
        means, roots = _mean_and_root(gradients, states, group)
        del gradients
        updates = torch._foreach_div(means, roots)
        del roots
        if group["weight_decay"] > 0:
            torch._foreach_add_(updates, torch._foreach_mul(parameters, group["weight_decay"]))
        # The product is rounded to the parameter's dtype before it is subtracted, as released.
        torch._foreach_sub_(parameters, torch._foreach_mul(updates, group["lr"]))


class HuggingFaceAdamW(ReleasedOptimizer):
    """AdamW of transformers up to version 4, used by X-Pool, T-MASS and GAID.

    In contrast to torch's AdamW, `eps` is added before the bias correction, and the decay is applied to the updated
    weights. For each tensor p and step t:

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g g
        p <- p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps);  p <- p - lr decay p
    """

    @override
    def _update(self, parameters: list[Tensor], gradients: Any, states: list[State], group: dict[str, Any]) -> None:
        means, roots = _mean_and_root(gradients, states, group)
        first, second = (1.0 - beta ** states[0]["step"] for beta in group["betas"])
        torch._foreach_addcdiv_(parameters, means, roots, value=-group["lr"] * math.sqrt(second) / first)
        del roots
        if group["weight_decay"] > 0:
            # The product is rounded to the parameter's dtype before it is subtracted, as released.
            torch._foreach_sub_(parameters, torch._foreach_mul(parameters, group["lr"] * group["weight_decay"]))
