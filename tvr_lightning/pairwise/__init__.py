"""The algebra that makes scoring all pairs of texts and videos cheap."""

from tvr_lightning.pairwise.attention import TextConditionedAttention
from tvr_lightning.pairwise.base import Pairwise
from tvr_lightning.pairwise.blocks import score_in_blocks
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.factorised import PairVectors
from tvr_lightning.pairwise.gated import GatedAttention
from tvr_lightning.pairwise.increment import IncrementNetwork

__all__ = [
    "DensePairVectors",
    "GatedAttention",
    "IncrementNetwork",
    "PairVectors",
    "Pairwise",
    "TextConditionedAttention",
    "score_in_blocks",
]
