"""NCL: `method.py` says where it deviates from its paper and has its options, `model.py` has its equations."""

from tvr_lightning.methods.ncl.method import NCL

__all__ = ["NCL"]
