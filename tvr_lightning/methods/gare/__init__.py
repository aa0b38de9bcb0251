"""GARE: `method.py` says where it deviates from its paper, `model.py` has its equations, `options.py` its options."""

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
