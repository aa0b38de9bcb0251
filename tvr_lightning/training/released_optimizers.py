"""BertAdam as the released CLIP4Clip family uses it, for many tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor

TOGETHER = 2**25
"""Numbers that are updated together: the update holds three more of their size, here 128 MiB each in float32."""


class BertAdam(torch.optim.Optimizer):
    """Adam without bias correction, with decay in the update and clipping per tensor (released BertAdam).

    The optimiser of CLIP4Clip's modules/optimization.py, which GARE, X-CLIP and TC-MGC share. For each tensor p:

        g <- g min(1, clip / (|g| + 1e-6));  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g g
        p <- p - lr (m / (sqrt(v) + eps) + decay p)

    Each line is computed for many tensors by one call (`torch._foreach_*`): a ViT-B/32 has 370 tensors, and on a GPU
    most of them are updated faster than a kernel of their own is launched. Nothing waits for the device.

    State and update have the parameter's own dtype: half-precision master weights then move by less than half a unit in
    the last place for most weights at the released encoder learning rate of 1e-7, and so stay where they are.

    Args:
        params: tensors, or groups with `lr` and `weight_decay` of their own.
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the root of the running mean of squares.
        weight_decay: decoupled decay, multiplied by the learning rate.
        per_tensor_clip: largest norm of each tensor's gradient; None clips none.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.2,
        per_tensor_clip: float | None = 1.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "per_tensor_clip": per_tensor_clip,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's loss, if there is a closure.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _together(group["params"]):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update tensors of one device and dtype.

        Every multiplication with a number is out of place: torch's in-place `_foreach_mul_` first rounds the number to
        the tensors' dtype, and 1e-7 becomes 1.19e-7 in float16.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["mean"] = torch.zeros_like(parameter)
                state["square"] = torch.zeros_like(parameter)
        if group["per_tensor_clip"] is not None:
            norms = torch.stack(torch._foreach_norm(gradients))
            clips = (group["per_tensor_clip"] / (norms + 1e-6)).clamp(max=1.0)
            gradients = list(torch._foreach_mul(gradients, clips.unbind()))
        first, second = group["betas"]
        means = torch._foreach_mul([state["mean"] for state in states], first)
        torch._foreach_add_(means, gradients, alpha=1 - first)
        squares = torch._foreach_mul([state["square"] for state in states], second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        for state, mean, square in zip(states, means, squares, strict=True):
            state["mean"], state["square"] = mean, square
        del gradients
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        del roots
        if group["weight_decay"] > 0:
            torch._foreach_add_(updates, torch._foreach_mul(parameters, group["weight_decay"]))
        # The product is rounded to the parameter's dtype before it is subtracted, as released.
        torch._foreach_sub_(parameters, torch._foreach_mul(updates, group["lr"]))


def _together(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield those with a gradient in lists of one device and dtype, up to `TOGETHER` numbers or one tensor each."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise ValueError(
                f"BertAdam takes dense gradients; a parameter of shape {tuple(parameter.shape)} has a sparse"
            )
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    for tensors in kinds.values():
        batch: list[Tensor] = []
        numbers = 0
        for tensor in tensors:
            if batch and numbers + tensor.numel() > TOGETHER:
                yield batch
                batch, numbers = [], 0
            batch.append(tensor)
            numbers += tensor.numel()
        yield batch
