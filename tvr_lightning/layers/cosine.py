"""Normalization of vectors to unit length."""

from torch import Tensor

COSINE_EPS = 1e-8
"""Minimum length that a vector is divided by, so that zero vectors have cosine 0 and finite gradients."""


def unit(vectors: Tensor) -> Tensor:
    """Return `vectors` (..., D) at Euclidean length 1. Lengths below `COSINE_EPS` count as `COSINE_EPS`."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=COSINE_EPS)
