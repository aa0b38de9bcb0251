"""GARE: deviations from the paper in `method.py`, equations in `model.py`, options in `options.py`."""

from tvr_lightning.methods.gare.method import GARE
from tvr_lightning.methods.gare.options import (
    Bottleneck,
    GapIncrement,
    GAREOptions,
    LogMeanExp,
    LogSumExp,
    MeanPooling,
    NoIncrement,
    Orthogonal,
    TextIncrement,
    TextPooling,
    Variance,
)

__all__ = [
    "GARE",
    "Bottleneck",
    "GAREOptions",
    "GapIncrement",
    "LogMeanExp",
    "LogSumExp",
    "MeanPooling",
    "NoIncrement",
    "Orthogonal",
    "TextIncrement",
    "TextPooling",
    "Variance",
]
