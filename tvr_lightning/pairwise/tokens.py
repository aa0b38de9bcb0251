"""Similarities of all tokens of all pairs, in a memory layout that suits their aggregation.

Texts are the last axis, because a block has many of them: a softmax over words or frames then runs along complete rows,
and the matrix product writes the similarities in place, without a copy.
"""

from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.pairwise.base import chained


def token_similarities(video: Tensor, text: Tensor) -> Tensor:
    """Return inner products (F, M, W, N) of all tokens of videos (M, F, D) and texts (N, W, D), contiguous."""
    if video.ndim != 3 or text.ndim != 3 or video.shape[2] != text.shape[2]:
        raise UserError(
            f"token_similarities needs (M, F, D) and (N, W, D) with the same D, not {tuple(video.shape)} and "
            f"{tuple(text.shape)}"
        )
    products = _rows(video) @ _rows(text).T
    return products.view(video.shape[1], len(video), text.shape[1], len(text))


def _rows(tokens: Tensor) -> Tensor:
    """Return tokens (B, T, D) as rows (T B, D)."""
    return tokens.transpose(0, 1).flatten(0, 1)


def mapped_between(video: Tensor, text: Tensor, *matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens for products (w A B ...) . f, with the matrices (D, D) applied to the side with fewer tokens."""
    if text.shape[:-1].numel() <= video.shape[:-1].numel():
        return video, chained(text, *(matrix.T for matrix in matrices))
    return chained(video, *reversed(matrices)), text
