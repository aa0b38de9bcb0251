"""TCMGC: see `method.py` for the paper and where this code deviates from it."""

from tvr_lightning.methods.tcmgc.method import TCMGC

__all__ = ["TCMGC"]
