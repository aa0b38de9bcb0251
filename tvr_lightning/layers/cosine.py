"""The one way in which vectors are brought to unit length."""

from __future__ import annotations

from torch import Tensor

COSINE_EPS = 1e-8
"""Smallest length that a vector is divided by: vectors of zero have cosine 0 and finite gradients."""


def unit(vectors: Tensor) -> Tensor:
    """Return `vectors` (..., D) at Euclidean length 1; shorter ones than `COSINE_EPS` are divided by that."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=COSINE_EPS)
