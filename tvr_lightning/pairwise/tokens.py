"""Similarities of all tokens of all pairs, laid out so that what aggregates them reads memory in its order.

Texts come last, for they are many in a block: a softmax over words or over frames then runs along whole rows, and the
product that makes the similarities writes them in place, without a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tvr_lightning.pairwise.once import once, origin_of


def token_similarities(video: Tensor, text: Tensor) -> Tensor:
    """Return inner products of every token of every video with every token of every text.

    Args:
        video: (M, F, D) frames or patches of each video.
        text: (N, W, D) words of each text.

    Returns:
        (F, M, W, N), contiguous.

    Raises:
        ValueError: tokens of other than 3 axes, or of different D.

    Example:
        >>> video, text = torch.randn(2, 12, 64), torch.randn(5, 32, 64)
        >>> token_similarities(video, text).shape
        torch.Size([12, 2, 32, 5])
    """
    if video.ndim != 3 or text.ndim != 3 or video.shape[2] != text.shape[2]:
        raise ValueError(
            f"token_similarities needs (M, F, D) and (N, W, D) with the same D, not {tuple(video.shape)} and "
            f"{tuple(text.shape)}"
        )
    products = _rows(video) @ _rows(text).T
    return products.view(video.shape[1], len(video), text.shape[1], len(text))


def _rows(tokens: Tensor) -> Tensor:
    """Return tokens (B, T, D) as rows (T B, D), once where they meet several blocks."""
    origin = origin_of(tokens)
    return once(None if origin is None else (*origin, "rows"), lambda: tokens.transpose(0, 1).flatten(0, 1))


def mapped_by(vectors: Tensor, *matrices: Tensor) -> Tensor:
    """Return vectors times matrices in a row, which are multiplied first where the vectors are more than D.

    Args:
        vectors: (..., D).
        matrices: (D, D) each.

    Returns:
        (..., D).

    Example:
        >>> vectors, first, second = torch.randn(4, 3), torch.randn(3, 3), torch.randn(3, 3)
        >>> torch.allclose(mapped_by(vectors, first, second), vectors @ first @ second, atol=1e-5)
        True
    """
    if not matrices:
        return vectors
    if vectors.shape[:-1].numel() <= vectors.shape[-1]:
        for matrix in matrices:
            vectors = vectors @ matrix
        return vectors
    return vectors @ (matrices[0] if len(matrices) == 1 else torch.linalg.multi_dot(list(matrices)))


def mapped_between(video: Tensor, text: Tensor, *matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens whose inner products are those with matrices between, which map the side that has fewer tokens.

    Args:
        video: (M, F, D).
        text: (N, W, D).
        matrices: (D, D) each: of a word w and a frame f, (w A B ...) . f.

    Returns:
        Tokens of the videos and of the texts, of the same shapes.

    Example:
        >>> video, text, matrix = torch.randn(2, 3, 4), torch.randn(5, 6, 4), torch.randn(4, 4)
        >>> frames, words = mapped_between(video, text, matrix)
        >>> moved, plain = token_similarities(frames, words), token_similarities(video, text @ matrix)
        >>> words is text, torch.allclose(moved, plain, atol=1e-4)
        (True, True)
    """
    if text.shape[:-1].numel() <= video.shape[:-1].numel():
        return video, mapped_by(text, *matrices)
    return mapped_by(video, *[matrix.T for matrix in reversed(matrices)]), text
