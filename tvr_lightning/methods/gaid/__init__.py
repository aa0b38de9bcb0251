"""GAID: deviations from the paper in `method.py`, equations in `model.py`, options in `options.py`."""

from tvr_lightning.methods.gaid.method import GAID
from tvr_lightning.methods.gaid.options import DASP, STP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation

__all__ = ["DASP", "GAID", "STP", "GAIDOptions", "GatedFusion", "NoFusion", "NoPerturbation"]
