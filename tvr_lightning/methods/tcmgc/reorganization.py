"""Similarity reorganization: keep the largest similarities, remove the others or fuse them into one (TC-MGC, 3.4).

The slots of a vector of similarities come first in every result, so that each slot is one contiguous plane over the
pairs. A similarity of minus infinity stands for a slot that is not there, a padded word for instance.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tvr_lightning.layers.aggregation import weighted_sum

Reorganization = Literal["off", "removal", "fusion"]

INSERTION_LIMIT = 8
"""Largest number of kept slots for which inserting slot by slot beats torch.topk over short rows on a CPU."""


def kept_slots(slots: int, keep_rate: float, mode: Reorganization, name: str) -> int:
    """Return k = int(slots r), the slots that reorganization keeps (TC-MGC, section 3.4).

    Args:
        slots: number of similarities.
        keep_rate: r.
        mode: `off` needs no rate and keeps all.
        name: of the option, for the error.

    Raises:
        ValueError: nothing would be kept, or nothing be left to fuse.
    """
    if mode == "off":
        return slots
    kept = int(slots * keep_rate)
    if not 1 <= kept <= slots:
        raise ValueError(
            f"keep_rate {keep_rate} keeps {kept} of {slots} slots of reorganization.{name}; "
            f"it must lie between {1 / slots:.3g} and 1"
        )
    if mode == "fusion" and kept == slots:
        raise ValueError(
            f"keep_rate {keep_rate} keeps all {slots} slots, so reorganization.{name}: fusion has nothing to fuse; "
            "lower the rate or choose off"
        )
    return kept


def reorganize(similarities: Tensor, kept: int, mode: Reorganization, dim: int = 0, whole: bool = False) -> Tensor:
    """Keep the largest similarities in falling order; remove the others, or append their softmax-weighted sum.

    Args:
        similarities: (..., S, ...) with the S slots along `dim`; minus infinity where there is no slot.
        kept: number of slots that stay, TC-MGC's k = int(S r).
        mode: `off` keeps all in their order, `removal` the `kept` largest, `fusion` these and one fused slot, whose
            softmax has no temperature (TC-MGC's released code; Appendix C).
        dim: where the slots are.
        whole: promises that all slots are there.

    Returns:
        (S', ...), slots first: S' is S, `kept` or `kept` + 1.
    """
    slots = similarities.movedim(dim, 0)
    if mode == "off":
        return slots
    if mode == "removal":
        return largest(slots, kept)
    ordered = slots.sort(0, descending=True).values
    rest = ordered[kept:]
    return torch.cat([ordered[:kept], weighted_sum(rest, rest, whole=whole).unsqueeze(0)])


def largest(slots: Tensor, kept: int) -> Tensor:
    """Return the `kept` largest of (S, ...) in falling order, (kept, ...)."""
    if torch.is_grad_enabled() or slots.device.type != "cpu" or kept > INSERTION_LIMIT:
        return slots.topk(kept, dim=0).values
    if slots.stride(-1) != 1:
        slots = slots.contiguous()
    top = [slots.new_full(slots.shape[1:], -torch.inf) for _ in range(kept)]
    for plane in slots:
        for rank in range(kept):
            top[rank], plane = torch.maximum(top[rank], plane), torch.minimum(top[rank], plane)
    return torch.stack(top)
