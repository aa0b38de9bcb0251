"""Similarity reorganization: keep the largest similarities, remove the others or fuse them into one (TC-MGC, 3.4).

Slots are the first dimension of every result, so that each slot is contiguous over the pairs. A similarity of minus
infinity marks an absent slot, such as a padded word.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.layers.aggregation import weighted_sum

Reorganization = Literal["off", "removal", "fusion"]

INSERTION_LIMIT = 8
"""Maximum number of kept slots for which insertion slot by slot is faster than torch.topk over short rows on a CPU."""


def kept_slots(slots: int, keep_rate: float, mode: Reorganization, name: str) -> int:
    """Return k = int(slots r), the number of slots that reorganization keeps (TC-MGC, section 3.4).

    Args:
        slots: Number of similarities.
        keep_rate: Keep rate r.
        mode: Mode of reorganization. `off` ignores the rate and keeps all.
        name: Name of the option, for the error.

    Raises:
        UserError: No slot would be kept, or none would be left to fuse.
    """
    if mode == "off":
        return slots
    kept = int(slots * keep_rate)
    if not 1 <= kept <= slots:
        raise UserError(
            f"keep_rate {keep_rate} keeps {kept} of {slots} slots of reorganization.{name}; "
            f"it must be between {1 / slots:.3g} and 1"
        )
    if mode == "fusion" and kept == slots:
        raise UserError(
            f"keep_rate {keep_rate} keeps all {slots} slots, so reorganization.{name}: fusion has nothing to fuse. "
            "Lower the rate or choose off."
        )
    return kept


def reorganize(similarities: Tensor, kept: int, mode: Reorganization, dim: int = 0, whole: bool = False) -> Tensor:
    """Return the `kept` largest of S similarities along `dim`, slots first and in decreasing order.

    `off` returns all in order, `removal` drops the others, and `fusion` appends their softmax-weighted sum, without a
    temperature (TC-MGC's released code; Appendix C). Absent slots are minus infinity.
    """
    slots = similarities.movedim(dim, 0)
    if mode == "off":
        return slots
    if mode == "removal":
        return largest(slots, kept)
    top, rest = parted(slots, kept)
    return torch.cat([top, weighted_sum(rest, rest, whole=whole).unsqueeze(0)])


def largest(slots: Tensor, kept: int) -> Tensor:
    """Return the `kept` largest of (S, ...) in decreasing order, (kept, ...)."""
    if _inserts(slots, kept):
        return _inserted(slots, kept, slots.new_empty(0))
    return slots.topk(kept, dim=0).values


def parted(slots: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Return the `kept` largest of (S, ...) in decreasing order, (kept, ...), and the others, (S - kept, ...)."""
    if _inserts(slots, kept):
        others = slots.new_empty(len(slots) - kept, *slots.shape[1:])
        return _inserted(slots, kept, others), others
    ordered = slots.sort(0, descending=True).values
    return ordered[:kept], ordered[kept:]


def _inserts(slots: Tensor, kept: int) -> bool:
    return not torch.is_grad_enabled() and slots.device.type == "cpu" and kept <= INSERTION_LIMIT


def _inserted(slots: Tensor, kept: int, others: Tensor) -> Tensor:
    """Return the `kept` largest of (S, ...) in decreasing order. The rest is written to `others` if not empty."""
    if slots.stride(-1) != 1:
        slots = slots.contiguous()
    top = slots.new_empty(kept, *slots.shape[1:])
    spare = slots.new_empty(2, *slots.shape[1:])  # reused, so that it stays in the caches
    ranks, turns = list(top), list(spare)
    for place, plane in enumerate(slots):
        new = plane
        for rank, larger in enumerate(ranks[:place]):
            if rank < kept - 1:
                smaller = turns[rank % 2]
            elif len(others):
                smaller = others[place - kept]
            else:  # values below the last rank are not needed
                torch.maximum(larger, new, out=larger)
                continue
            torch.minimum(larger, new, out=smaller)
            torch.maximum(larger, new, out=larger)
            new = smaller
        if place < kept:
            top[place] = new
    return top
