"""FSDP2: weights, gradients and optimizer state of a method, sharded over devices."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from tvr_lightning.encoders.base import Encoder


def shard(module: nn.Module, mesh: DeviceMesh, matrices_in: torch.dtype = torch.float32) -> None:
    """Shard every child of `module` that has parameters, and each transformer block separately.

    While they are unused, each of the W devices of `mesh` stores 1 / W of the parameters; those of a block are gathered
    while it computes. Parameters must be used only in the forward or public methods of the children. The matrices of
    the encoder's blocks are gathered and used in `matrices_in`, as under autocast, but stored and reduced in float32. A
    second call changes nothing, because Lightning configures a model for every stage.
    """
    # Methods return views but do not modify them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for unit in _units(module):
        if isinstance(unit, FSDPModule):
            continue
        for block in _blocks(unit):
            for part in _matrices(block) if isinstance(unit, Encoder) and matrices_in != torch.float32 else ():
                # Under autocast, which casts the inputs.
                policy = MixedPrecisionPolicy(matrices_in, torch.float32, cast_forward_inputs=False)
                fully_shard(part, mesh=mesh, mp_policy=policy)
            fully_shard(block, mesh=mesh)
        fully_shard(unit, mesh=mesh)
        _gather_in_methods(unit)


def is_sharded(module: Any) -> bool:
    """Return whether the parameters of `module` are sharded, so that all devices must compute with it together."""
    return any(isinstance(unit, FSDPModule) for unit in module.modules())


@contextmanager
def gathered(module: Any, apart: Any) -> Iterator[None]:
    """Keep the full parameters of a method on every device while it scores; without sharding, do nothing.

    The devices may score different numbers of blocks, and a device with one more block would gather parameters when the
    others do not. `apart` is the encoder, which scoring does not use and which may not fit in memory.
    """
    others = set(apart.modules())
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule) and unit not in others]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()


def _gather_in_methods(unit: nn.Module) -> None:
    """Make public methods gather parameters as `forward` does, but not in nested calls, whose end frees them."""
    depth = 0

    def outermost(plain: Callable[..., Any], gathering: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def method(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                return (plain if depth > 1 else gathering)(*arguments, **options)
            finally:
                depth -= 1

        return method

    unit.forward = _without_placeholder(outermost(unit.forward, unit.forward))
    unit.register_forward_pre_hook(_add_placeholder, prepend=True, with_kwargs=True)
    for name, _ in inspect.getmembers(type(unit), inspect.isfunction):
        if not (name.startswith("_") or hasattr(nn.Module, name) or hasattr(FSDPModule, name)):
            plain = getattr(unit, name)
            setattr(unit, name, _without_placeholder(plain))
            register_fsdp_forward_method(unit, name)
            setattr(unit, name, outermost(plain, functools.partial(getattr(unit, name), placeholder=None)))


def _add_placeholder(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Add an option, because FSDP2 before torch 2.13 fails on GPUs in calls without any (pytorch/pytorch#183943)."""
    return arguments, options | {"placeholder": None}


def _without_placeholder(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(*arguments: Any, placeholder: None = None, **options: Any) -> Any:
        return plain(*arguments, **options)

    return method


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that compute, each once. Containers and nested methods are replaced by their children."""
    for child in dict.fromkeys(module.children()):
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or hasattr(child, "training_step"):
            yield from _units(child)
        elif any(True for _ in child.parameters()):
            yield child


def _blocks(unit: nn.Module) -> list[nn.Module]:
    """Return the layers of the transformers in a unit: members of lists of two or more modules of one class."""
    blocks: list[nn.Module] = []
    for part in unit.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1:
            kinds = {type(layer) for layer in part}
            if len(kinds) == 1 and nn.Linear not in kinds:
                blocks += [layer for layer in part if any(True for _ in layer.parameters())]
    return blocks


def _matrices(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest parts of a block that have matrices and no normalization, whose weights stay float32."""
    for part in block.children():
        if any("norm" in type(each).__name__.lower() for each in part.modules()):
            yield from _matrices(part)
        elif any(parameter.ndim > 1 for parameter in part.parameters()):
            yield part
