"""The algebra that makes scoring all pairs of texts and videos cheap."""

from tvr_lightning.pairwise.attention import TextConditionedAttention
from tvr_lightning.pairwise.base import Pairwise
from tvr_lightning.pairwise.blends import BlendedFrames, DenseFrames, PairFrames, PairGate, PlainFrames
from tvr_lightning.pairwise.blocks import score_in_blocks
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.factorised import PairVectors

__all__ = [
    "BlendedFrames",
    "DenseFrames",
    "DensePairVectors",
    "PairFrames",
    "PairGate",
    "PairVectors",
    "Pairwise",
    "PlainFrames",
    "TextConditionedAttention",
    "score_in_blocks",
]
