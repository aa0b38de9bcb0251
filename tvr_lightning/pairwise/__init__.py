"""The algebra that makes scoring all pairs of texts and videos cheap."""

from tvr_lightning.pairwise.attention import TextConditionedAttention
from tvr_lightning.pairwise.base import Pairwise
from tvr_lightning.pairwise.blocks import score_in_blocks
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.factorised import PairVectors

__all__ = [
    "DensePairVectors",
    "PairVectors",
    "Pairwise",
    "TextConditionedAttention",
    "score_in_blocks",
]
