"""Contrastive losses on a matrix of logits: scores times the inverse temperature.

Row i of the texts matches column i of the videos. Another caption's copy of the same video counts as a negative, as in
every released code that the papers build on (CLIP4Clip, `CrossEn`).
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tvr_lightning.errors import UserError

Reduction = Literal["mean", "sum"]
LogitMap = Callable[[Tensor], Tensor]  # transformation of the logits (B, B) before InfoNCE, such as NCL's biases


def row_cross_entropy(logits: Tensor, weight: Tensor | None = None, first: int = 0) -> Tensor:
    """Return the cross-entropy of each row's matching column: -sum_i w_i log softmax_j(l_ij)[first + i].

    `logits` (B, C) belong to B queries and C candidates, `weight` (B,) to the rows (1 / B by default); `first` is the
    column of the first row's match.
    """
    target = torch.arange(first, first + len(logits), device=logits.device)
    if weight is None:
        return F.cross_entropy(logits, target)
    if weight.shape != target.shape:
        raise UserError(f"InfoNCE needs one weight per pair, {tuple(target.shape)}, got {tuple(weight.shape)}")
    return (weight * F.cross_entropy(logits, target, reduction="none")).sum()


def info_nce(
    logits: Tensor,
    video_to_text_logits: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return InfoNCE in both directions: text to video over rows, video to text over columns.

    With the default options: 1/2 (-1/B sum_i log softmax_j(l_ij)[i] - 1/B sum_j log softmax_i(l_ij)[j])
    (CLIP4Clip, `CrossEn` in modules/until_module.py; modules/modeling.py takes the mean of both directions).

    Args:
        logits: Logits of B texts (rows) against their B videos (columns), (B, B).
        video_to_text_logits: Separate logits (B, B) for the direction over columns, in the same layout.
        weight: Weight of each pair, (B,), the same for both directions; 1 / B by default.
        reduction: `mean` of both directions, or their `sum` as in some papers (twice the gradient).

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
        >>> info_nce(logits), info_nce(logits, reduction="sum")
        (tensor(0.1269), tensor(0.2539))
    """
    columns = logits if video_to_text_logits is None else video_to_text_logits
    for matrix in (logits, columns):
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise UserError(f"InfoNCE over rows and columns needs square logits, got {tuple(matrix.shape)}")
    pairs = len(logits)
    if weight is not None:
        both = row_cross_entropy(logits, weight) + row_cross_entropy(columns.T, weight)
        return both / 2 if reduction == "mean" else both
    target = torch.arange(2 * pairs, device=logits.device) % pairs
    mean = F.cross_entropy(torch.cat([logits, columns.T]), target)  # one operation for both directions
    return mean if reduction == "mean" else 2 * mean


def local_info_nce(rows: Tensor, columns: Tensor, first: int) -> Tensor:
    """Return one device's share of InfoNCE, for the logits (B, C) of its texts and (C, B) of its videos.

    The mean over devices is the loss of the whole batch; `first` is the index of the device's first pair.
    """
    return (row_cross_entropy(rows, first=first) + row_cross_entropy(columns.T, first=first)) / 2


def positive_weights(similarity: Tensor) -> Tensor:
    """Return weights w_i = s_ii / sum_k s_kk of pairs by their similarity (B, B), without gradient (GAID, released).

    https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/trainer/trainer_stochastic.py#L65-L67
    https://github.com/YangBowenn/GAID/blob/21ee64cd8662f697eaa0bfaa03d8133e8bf9905b/modules/loss.py#L27-L30

    The paper describes plain InfoNCE. A negative similarity of a matching pair gives it a negative weight, as released.
    """
    own = similarity.detach().diagonal()
    return own / own.sum()
