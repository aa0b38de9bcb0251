"""GAID: `method.py` says where it deviates from its paper, `model.py` has its equations, `options.py` its options."""

from tvr_lightning.methods.gaid.method import GAID
from tvr_lightning.methods.gaid.options import DASP, STP, GAIDOptions, GatedFusion, NoFusion, NoPerturbation

__all__ = ["DASP", "GAID", "STP", "GAIDOptions", "GatedFusion", "NoFusion", "NoPerturbation"]
