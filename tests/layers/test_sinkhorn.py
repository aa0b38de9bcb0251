"""Sinkhorn biases against the papers' equations in float64, and at convergence."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tvr_lightning.layers.sinkhorn import sinkhorn_biases, sinkhorn_log_weights


def with_marginals(similarity, gamma, iterations, rows=1.0, columns=1.0):
    """The biases for marginals (N,) and (M,)."""
    logits = similarity / gamma
    log_weights = sinkhorn_log_weights(
        lambda weights: (logits + weights).logsumexp(1),
        lambda weights: (logits if weights is None else logits + weights[:, None]).logsumexp(0),
        iterations,
        torch.as_tensor(rows).log(),
        torch.as_tensor(columns).log(),
    )
    return [gamma * weights for weights in log_weights]


def balanced(similarity: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gamma: float) -> torch.Tensor:
    """The matrix that the biases balance, scaled to a mean row sum of 1."""
    matrix = ((similarity + a[:, None] + b) / gamma).double()
    return (matrix - matrix.logsumexp((0, 1))).exp() * len(similarity)


@pytest.mark.parametrize("case", ["ncl", "ncl_gamma_0.01"])
def test_float32_biases_equal_the_equations(parity_cases, case):
    path = parity_cases / f"{case}.safetensors"
    with safe_open(path, "pt") as file:
        gamma = json.loads(file.metadata()["config"])["gamma"]
    tensors = load_file(path)
    for name, bias in zip(("text", "video"), sinkhorn_biases(tensors["expected.cosine"].float(), gamma), strict=True):
        assert bias.dtype == torch.float32
        expected = tensors[f"expected.iterations_4.{name}_bias"]
        torch.testing.assert_close(bias.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradient_through_the_iterations_equals_finite_differences():
    similarity = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    gamma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, g: sinkhorn_biases(s, g, 3), (similarity, gamma))


@pytest.mark.parametrize(
    ("rows", "columns"), [([1.0] * 6, [1.0] * 6), ([1.0, 2.0, 1.0, 1.0, 3.0, 4.0], [5.0, 1.0, 1.0, 1.0])]
)
def test_any_matrix_meets_its_marginals_at_convergence(rows, columns):
    rows, columns = torch.tensor(rows, dtype=torch.float64), torch.tensor(columns, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    similarity = torch.rand(len(rows), len(columns), generator=generator, dtype=torch.float64)
    matrix = balanced(similarity, *with_marginals(similarity, 0.1, 500, rows, columns), 0.1)
    torch.testing.assert_close(matrix.sum(1) / matrix.sum(), rows / rows.sum())
    torch.testing.assert_close(matrix.sum(0) / matrix.sum(), columns / columns.sum())
