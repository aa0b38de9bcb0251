"""GARE: see `method.py` for the paper and where this code deviates from it."""

from tvr_lightning.methods.gare.method import GARE

__all__ = ["GARE"]
