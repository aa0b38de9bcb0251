"""What belongs to one side of the pairs alone, computed once per call although pairs are scored block by block.

The tensors of one side meet several blocks of the other one. What the verbs make of those alone, such as a projection
of all texts, is kept from block to block while nobody asks for gradients: with gradients on, a block is computed anew
in the backward pass, and needs its own graph.
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
    """Keep what is made of `tensors` alone while the context lasts; without gradients only.

    Within another such context, which goes on, what is made of its tensors stays known.

    Args:
        tensors: (any shape) that several blocks meet.
        blocks: how many; for a single one nothing is kept.

    Example:
        >>> texts, made = torch.eye(2), []
        >>> with torch.no_grad(), persisting([texts], blocks=2):
        ...     for block in range(2):
        ...         doubled = once((*origin_of(texts), "twice"), lambda: made.append(block) or 2 * texts)
        >>> made, doubled
        ([0], tensor([[2., 0.],
                [0., 2.]]))
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
    """Return a name of a persisting tensor, or of a view of all of it (any shape); None where it does not persist.

    Example:
        >>> origin_of(torch.eye(2)) is None
        True
    """
    call = _CALL.get()
    place = _place(tensor)
    return (place, tuple(tensor.shape)) if call is not None and place in call.blocks else None


def once(origin: Origin | None, function: Callable[[], Tensor]) -> Tensor:
    """Return `function()` (any shape), kept under its origin; computed every time where that is None.

    Example:
        >>> once(None, lambda: torch.ones(1))
        tensor([1.])
    """
    call = _CALL.get()
    if call is None or origin is None:
        return function()
    if origin not in call.found:
        call.found[origin] = function()
    return call.found[origin]


def name_of(thing: object) -> Hashable:
    """Return a name of a layer or matrix that nothing else has while the call lasts.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> name_of(layer) == name_of(layer)
        True
    """
    call = _CALL.get()
    if call is not None:
        call.named[id(thing)] = thing  # held, so that no later one takes its place in memory
    return id(thing)


def share_of_a_block(origin: Origin | None) -> float:
    """Return which share of the cost of something made once falls to one block.

    Example:
        >>> share_of_a_block(None)
        1.0
    """
    call = _CALL.get()
    return 1.0 if call is None or origin is None else 1.0 / call.blocks[origin[0]]


def _place(tensor: Tensor) -> Hashable:
    """Name the elements of a tensor: those of persisting ones are never freed, so that no other has the name."""
    return (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.numel(), tensor.is_contiguous())
