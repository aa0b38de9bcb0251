"""DPDV: see `method.py` for the paper and where this code deviates from it."""

from tvr_lightning.methods.dpdv.method import DPDV

__all__ = ["DPDV"]
