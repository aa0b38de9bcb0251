"""Sinkhorn's algorithm in the log domain: biases that balance how often each text and each video is retrieved.

NCL (Park et al., Fig. 4 and Eqs. 8 to 11) scales exp(S) by alpha_i and beta_j so that rows and columns add up to their
marginals. At CLIP's temperatures, exp(S) overflows float32, but its logarithms do not.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tvr_lightning.errors import UserError

LogSumExp = Callable[[Tensor | None], Tensor]


def sinkhorn_log_weights(
    row_logsumexp: LogSumExp,
    column_logsumexp: LogSumExp,
    iterations: int,
    log_row_marginal: Tensor | float = 0.0,
    log_column_marginal: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Run Sinkhorn's iterations on a matrix (N, M) given only by its log sums (NCL, Fig. 4, in logarithms).

    beta starts as c / column sums; then alpha = r / (M beta) and beta = c / (alpha M), `iterations` times (the paper:
    4). Returns log alpha (N,) and log beta (M,), each normalized so that its exponentials add up to 1.
    """
    if iterations < 1:
        raise UserError(f"Sinkhorn needs at least one iteration, got {iterations}")
    columns = log_column_marginal - column_logsumexp(None)
    for _ in range(iterations):
        rows = log_row_marginal - row_logsumexp(columns)
        columns = log_column_marginal - column_logsumexp(rows)
    return rows - rows.logsumexp(0), columns - columns.logsumexp(0)


def sinkhorn_biases(
    similarity: Tensor,
    temperature: float | Tensor,
    iterations: int = 4,
    *,
    row_marginal: Tensor | None = None,
    column_marginal: Tensor | None = None,
    row_mask: Tensor | None = None,
    column_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return biases a (N,) and b (M,) that balance exp((s_ij + a_i + b_j) / gamma) (NCL, Eqs. 10 and 11).

    Differentiable in the similarity (N, M) and the temperature gamma. Marginals (N,) and (M,) are positive shares,
    uniform by default. Masked rows and columns are not balanced, and their bias is 0.

    Raises:
        UserError: Shapes do not fit, everything is masked, a marginal is not positive, or `iterations` is below 1.
    """
    if similarity.ndim != 2 or 0 in similarity.shape:
        raise UserError(f"Sinkhorn needs a matrix with rows and columns, got shape {tuple(similarity.shape)}")
    rows, columns = similarity.shape
    with torch.autocast(similarity.device.type, enabled=False):
        scores = similarity.float() if similarity.dtype in (torch.float16, torch.bfloat16) else similarity
        row_share = _log_share("row", rows, row_marginal, row_mask, scores)
        column_share = _log_share("column", columns, column_marginal, column_mask, scores)
        logits = scores / temperature

        def row_logsumexp(weights: Tensor | None) -> Tensor:
            return (logits if weights is None else logits + weights).logsumexp(1)

        def column_logsumexp(weights: Tensor | None) -> Tensor:
            # The first call has no weights yet, but must also exclude masked rows.
            start = _excluded(row_mask, scores) if weights is None else weights
            return (logits if start is None else logits + start[:, None]).logsumexp(0)

        log_alpha, log_beta = sinkhorn_log_weights(row_logsumexp, column_logsumexp, iterations, row_share, column_share)
        return _scaled(log_alpha, temperature, row_mask), _scaled(log_beta, temperature, column_mask)


def _excluded(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(len(mask), dtype=like.dtype, device=like.device).masked_fill(~mask, -math.inf)


def _log_share(side: str, size: int, marginal: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor:
    for name, value in (("marginal", marginal), ("mask", mask)):
        if value is not None and value.shape != (size,):
            raise UserError(f"{side}_{name} must be ({size},), one per {side}, got {tuple(value.shape)}")
    if mask is not None and not mask.any():
        raise UserError(f"{side}_mask masks every {side}")
    if marginal is None:
        share = torch.zeros(size, dtype=like.dtype, device=like.device)
    else:
        taking_part = marginal if mask is None else marginal[mask]
        if not (taking_part > 0).all():
            raise UserError(f"{side}_marginal must be positive for every unmasked {side}")
        share = marginal.to(like).log()
    # A weight of -inf excludes an item from all following sums.
    return share if mask is None else share.masked_fill(~mask, -math.inf)


def _scaled(log_weights: Tensor, temperature: float | Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        log_weights = log_weights.masked_fill(~mask, 0.0)
    return log_weights * temperature
