"""NCL: deviations from the paper and options in `method.py`, equations in `model.py`."""

from tvr_lightning.methods.ncl.method import NCL

__all__ = ["NCL"]
