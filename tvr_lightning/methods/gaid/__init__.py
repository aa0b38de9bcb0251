"""GAID: see `method.py` for the paper and where this code deviates from it."""

from tvr_lightning.methods.gaid.method import GAID

__all__ = ["GAID"]
