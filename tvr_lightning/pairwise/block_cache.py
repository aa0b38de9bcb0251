"""Cache for tensors that depend on one side of the pairs only, while pairs are scored block by block.

The tensors of one side are used in several blocks of the other side. Results that depend only on these tensors, such as
a projection of all texts, are kept from block to block if gradients are disabled. With gradients, a block is recomputed
in the backward pass and needs its own graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

Origin = tuple[Hashable, ...]


@dataclass
class _Call:
    blocks: dict[Hashable, int] = field(default_factory=dict)
    found: dict[Origin, Tensor] = field(default_factory=dict)
    named: dict[int, object] = field(default_factory=dict)


_CALL: ContextVar[_Call | None] = ContextVar("pairwise_call", default=None)


@contextmanager
def persisting(tensors: Iterable[Tensor], blocks: int) -> Iterator[None]:
    """Cache results that depend only on `tensors` within the context, if gradients are disabled.

    Within another such context, which stays active, the results of its tensors remain cached.

    Args:
        tensors: Tensors (any shape) that several blocks use.
        blocks: Number of blocks; with a single block, nothing is cached.
    """
    call = None if torch.is_grad_enabled() else _CALL.get() or _Call()
    places = set() if call is None or blocks < 2 else {_place(tensor) for tensor in tensors} - set(call.blocks)
    token = _CALL.set(call)
    try:
        if call is not None:
            call.blocks |= dict.fromkeys(places, blocks)
        yield
    finally:
        _CALL.reset(token)
        if call is not None:
            call.blocks = {place: count for place, count in call.blocks.items() if place not in places}
            call.found = {origin: made for origin, made in call.found.items() if origin[0] not in places}


def origin_of(tensor: Tensor) -> Origin | None:
    """Return a name of a persisting tensor, or of a view of all of it (any shape), or None if it does not persist."""
    call = _CALL.get()
    place = _place(tensor)
    return (place, tuple(tensor.shape)) if call is not None and place in call.blocks else None


def once(origin: Origin | None, function: Callable[[], Tensor]) -> Tensor:
    """Return `function()` (any shape), cached under its origin, or computed every time if the origin is None."""
    call = _CALL.get()
    if call is None or origin is None:
        return function()
    if origin not in call.found:
        call.found[origin] = function()
    return call.found[origin]


def name_of(thing: object) -> Hashable:
    """Return a name of a layer or matrix that is unique during the call."""
    call = _CALL.get()
    if call is not None:
        call.named[id(thing)] = thing  # a reference, so that no later object reuses its id
    return id(thing)


def share_of_a_block(origin: Origin | None) -> float:
    """Return one block's share of the cost of a cached result."""
    call = _CALL.get()
    return 1.0 if call is None or origin is None else 1.0 / call.blocks[origin[0]]


def _place(tensor: Tensor) -> Hashable:
    """Return a name of a tensor's memory. Persisting tensors are never freed, so the name is unique."""
    return (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.numel(), tensor.is_contiguous())
