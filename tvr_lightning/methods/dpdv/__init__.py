"""DPDV: `method.py` says where it deviates from its paper, `model.py` has its equations, `options.py` its options."""

from tvr_lightning.methods.dpdv.method import DPDV
from tvr_lightning.methods.dpdv.options import (
    AveragePatches,
    Divergence,
    DPDVOptions,
    EveryPatch,
    PatchMerging,
    SelectedPatches,
)

__all__ = [
    "DPDV",
    "AveragePatches",
    "DPDVOptions",
    "Divergence",
    "EveryPatch",
    "PatchMerging",
    "SelectedPatches",
]
