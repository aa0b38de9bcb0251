"""Vector algebra for efficient scores of all text-video pairs."""

from tvr_lightning.pairwise.attention import TextConditionedAttention
from tvr_lightning.pairwise.base import DropoutPer, Pairwise
from tvr_lightning.pairwise.blended_frames import BlendedFrames, DenseFrames, PairFrames, PairGate, PlainFrames
from tvr_lightning.pairwise.blocks import score_in_blocks
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.factorized import PairVectors
from tvr_lightning.pairwise.tokens import mapped_between, mapped_by, token_similarities

__all__ = [
    "BlendedFrames",
    "DenseFrames",
    "DensePairVectors",
    "DropoutPer",
    "PairFrames",
    "PairGate",
    "PairVectors",
    "Pairwise",
    "PlainFrames",
    "TextConditionedAttention",
    "mapped_between",
    "mapped_by",
    "score_in_blocks",
    "token_similarities",
]
