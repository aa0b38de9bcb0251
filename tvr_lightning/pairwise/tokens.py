"""Similarities of all tokens of all pairs, in a memory layout that suits their aggregation.

Texts are the last axis, because a block has many of them: a softmax over words or frames then runs along complete rows,
and the matrix product writes the similarities in place, without a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.pairwise.block_cache import once, origin_of


def token_similarities(video: Tensor, text: Tensor) -> Tensor:
    """Return inner products of every token of every video with every token of every text.

    Args:
        video: Frames or patches of each video, (M, F, D).
        text: Words of each text, (N, W, D).

    Returns:
        Inner products (F, M, W, N), contiguous.

    Raises:
        UserError: Tokens do not have 3 axes or have different D.
    """
    if video.ndim != 3 or text.ndim != 3 or video.shape[2] != text.shape[2]:
        raise UserError(
            f"token_similarities needs (M, F, D) and (N, W, D) with the same D, not {tuple(video.shape)} and "
            f"{tuple(text.shape)}"
        )
    products = _rows(video) @ _rows(text).T
    return products.view(video.shape[1], len(video), text.shape[1], len(text))


def _rows(tokens: Tensor) -> Tensor:
    """Return tokens (B, T, D) as rows (T B, D), cached if several blocks use them."""
    origin = origin_of(tokens)
    return once(None if origin is None else (*origin, "rows"), lambda: tokens.transpose(0, 1).flatten(0, 1))


def mapped_by(vectors: Tensor, *matrices: Tensor) -> Tensor:
    """Return vectors times a sequence of matrices, which are multiplied first if there are more than D vectors.

    Args:
        vectors: Vectors (..., D).
        matrices: Matrices (D, D).

    Returns:
        Vectors (..., D).
    """
    if not matrices:
        return vectors
    if vectors.shape[:-1].numel() <= vectors.shape[-1]:
        for matrix in matrices:
            vectors = vectors @ matrix
        return vectors
    return vectors @ (matrices[0] if len(matrices) == 1 else torch.linalg.multi_dot(list(matrices)))


def mapped_between(video: Tensor, text: Tensor, *matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens whose inner products include matrices, applied to the side that has fewer tokens.

    Args:
        video: Tokens of the videos, (M, F, D).
        text: Tokens of the texts, (N, W, D).
        matrices: Matrices A, B, ... (D, D) in the product (w A B ...) . f of a word w and a frame f.

    Returns:
        Tokens of the videos and of the texts, in the same shapes.
    """
    if text.shape[:-1].numel() <= video.shape[:-1].numel():
        return video, mapped_by(text, *matrices)
    return mapped_by(video, *[matrix.T for matrix in reversed(matrices)]), text
