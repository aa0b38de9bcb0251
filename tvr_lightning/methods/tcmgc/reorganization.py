"""Similarity reorganization: keep the largest similarities, remove the others or fuse them into one (TC-MGC, 3.4).

Slots are the first dimension of every result, so that each slot is contiguous over the pairs. A similarity of minus
infinity marks an absent slot, such as a padded word.
"""

from typing import Literal

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.layers.aggregation import weighted_sum
from tvr_lightning.pairwise.tiles import loops_are_fast

Reorganization = Literal["off", "removal", "fusion"]

INSERTION_LIMIT = 8
"""Maximum number of kept slots for which insertion slot by slot is faster than torch.topk over short rows on a CPU."""


def kept_slots(slots: int, keep_rate: float, mode: Reorganization, name: str) -> int:
    """Return k = int(slots r), the number of slots that reorganization keeps (TC-MGC, section 3.4), or all for `off`.

    Raises:
        UserError: No slot would be kept, or none would be left to fuse; the message contains the option's name.
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
    top, others = parted(slots, kept, rest=mode == "fusion")
    return top if mode == "removal" else torch.cat([top, weighted_sum(others, others, whole=whole).unsqueeze(0)])


def parted(slots: Tensor, kept: int, rest: bool) -> tuple[Tensor, Tensor]:
    """Return the `kept` largest of (S, ...) in decreasing order, (kept, ...), and with `rest` the others."""
    if torch.is_grad_enabled() or not loops_are_fast(slots.device) or kept > INSERTION_LIMIT:
        ordered = slots.sort(0, descending=True).values if rest else slots.topk(kept, dim=0).values
        return ordered[:kept], ordered[kept:]
    top = [torch.full_like(slots[0], -torch.inf)] * kept
    others = []
    for new in slots:
        for rank, larger in enumerate(top):
            top[rank], new = torch.maximum(larger, new), torch.minimum(larger, new)
        if rest:
            others.append(new)
    return torch.stack(top), torch.stack(others[kept:]) if rest else slots[:0]
