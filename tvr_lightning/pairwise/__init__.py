"""Vector algebra for efficient scores of all text-video pairs.

Each text i and video j have their own vectors, written as in the papers and stored as a basis with coefficients.
`DensePairVectors` has the same operations on the elements.

Example:
    >>> import torch
    >>> from tvr_lightning.pairwise import PairVectors
    >>> frames = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # M 1 video, F 2 frames, D 2
    >>> weights = torch.tensor([0.25, 0.75]).view(1, 2, 1, 1)  # (M, F, N, Q): N 1 text with Q 1 query vector
    >>> attended = PairVectors.mix(weights, frames)
    >>> attended.materialize()  # (N, M, Q, D)
    tensor([[[[0.2500, 0.7500]]]])
    >>> text = PairVectors.from_texts(torch.tensor([[[3.0, 4.0]]]), videos=1)
    >>> (text + attended.linear(2 * torch.eye(2))).materialize()
    tensor([[[[3.5000, 5.5000]]]])
    >>> text.cosine(attended)  # (M, N, Q)
    tensor([[[0.9487]]])
    >>> attended.dot_frames(frames).flatten()  # (M, F, N, Q)
    tensor([0.2500, 0.7500])
"""

from tvr_lightning.pairwise.attention import TextConditionedAttention
from tvr_lightning.pairwise.base import Pairwise, chained
from tvr_lightning.pairwise.blended_frames import BlendedFrames, DenseFrames, PairFrames, PlainFrames
from tvr_lightning.pairwise.blocks import score_in_blocks
from tvr_lightning.pairwise.dense import DensePairVectors
from tvr_lightning.pairwise.factorized import PairVectors
from tvr_lightning.pairwise.tokens import mapped_between, token_similarities

__all__ = [
    "BlendedFrames",
    "DenseFrames",
    "DensePairVectors",
    "PairFrames",
    "PairVectors",
    "Pairwise",
    "PlainFrames",
    "TextConditionedAttention",
    "chained",
    "mapped_between",
    "score_in_blocks",
    "token_similarities",
]
