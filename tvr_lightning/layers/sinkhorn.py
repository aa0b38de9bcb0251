"""Sinkhorn's algorithm in the log domain: biases that balance how often each text and each video is retrieved.

NCL (Park et al., Fig. 4 and Eqs. 8 to 11) scales exp(S) by alpha_i and beta_j so that rows and columns add up to their
marginals. At CLIP's temperatures, exp(S) overflows float32, but its logarithms do not.
"""

from collections.abc import Callable

from torch import Tensor

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
    columns = log_column_marginal - column_logsumexp(None)
    for _ in range(iterations):
        rows = log_row_marginal - row_logsumexp(columns)
        columns = log_column_marginal - column_logsumexp(rows)
    return rows - rows.logsumexp(0), columns - columns.logsumexp(0)


def sinkhorn_biases(similarity: Tensor, temperature: float | Tensor, iterations: int = 4) -> tuple[Tensor, Tensor]:
    """Return biases a (N,) and b (M,) that balance exp((s_ij + a_i + b_j) / gamma) (NCL, Eqs. 10 and 11).

    Differentiable in the similarity (N, M) and the temperature gamma.
    """
    logits = similarity / temperature
    log_alpha, log_beta = sinkhorn_log_weights(
        lambda weights: (logits if weights is None else logits + weights).logsumexp(1),
        lambda weights: (logits if weights is None else logits + weights[:, None]).logsumexp(0),
        iterations,
    )
    return log_alpha * temperature, log_beta * temperature
