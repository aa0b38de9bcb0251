"""DPDV: deviations from the paper in `method.py`, equations in `model.py`, options in `options.py`."""

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
