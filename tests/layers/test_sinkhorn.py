"""Sinkhorn biases against the papers' equations in float64, at convergence, under masks and autocast."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tvr_lightning.layers.sinkhorn import sinkhorn_biases


def balanced(similarity: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gamma: float) -> torch.Tensor:
    """The matrix that the biases balance, scaled to a mean row sum of 1."""
    matrix = ((similarity + a[:, None] + b) / gamma).double()
    return (matrix - matrix.logsumexp((0, 1))).exp() * len(similarity)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["ncl", "ncl_gamma_0.01"])
def test_biases_equal_the_equations(parity_cases, case, dtype):
    path = parity_cases / f"{case}.safetensors"
    with safe_open(path, "pt") as file:
        gamma = json.loads(file.metadata()["config"])["gamma"]
    tensors = load_file(path)
    a, b = sinkhorn_biases(tensors["expected.cosine"].to(dtype), gamma)
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    assert a.dtype == b.dtype == dtype
    torch.testing.assert_close(a.double(), tensors["expected.iterations_4.text_bias"], **tolerance)
    torch.testing.assert_close(b.double(), tensors["expected.iterations_4.video_bias"], **tolerance)


@pytest.mark.parametrize("marginals", ["uniform", "count"])
def test_marginals_by_number_of_captions_equal_the_equations(parity_cases, marginals):
    tensors = load_file(parity_cases / "ncl_multi_caption.safetensors")
    share = tensors["input.video_marginal"] if marginals == "count" else None
    a, b = sinkhorn_biases(tensors["expected.cosine"], 0.05, column_marginal=share)
    expected = f"expected.oracle.{marginals}.iterations_4"
    torch.testing.assert_close(a, tensors[f"{expected}.text_bias"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(b, tensors[f"{expected}.video_bias"], rtol=1e-10, atol=1e-12)


def test_gradient_through_the_iterations_equals_finite_differences():
    similarity = torch.rand(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    gamma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda s, g: sinkhorn_biases(s, g, 3), (similarity, gamma))
    assert torch.autograd.gradcheck(lambda s, g: sinkhorn_biases(s, g, 3, column_mask=mask), (similarity, gamma))


def test_rows_and_columns_add_up_to_one_at_convergence():
    vectors = torch.nn.functional.normalize(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), dim=-1)
    similarity = (vectors[:32] @ vectors[32:].T).double()
    matrix = balanced(similarity, *sinkhorn_biases(similarity, 0.07, 2000), 0.07)
    assert (matrix.sum(0) - 1).abs().max() < 1e-5
    assert (matrix.sum(1) - 1).abs().max() < 1e-5


def test_rectangular_matrix_meets_its_marginals():
    similarity = torch.rand(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows = torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0, 4.0], dtype=torch.float64)
    columns = torch.tensor([5.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    a, b = sinkhorn_biases(similarity, 0.1, 500, row_marginal=rows, column_marginal=columns)
    matrix = balanced(similarity, a, b, 0.1)
    torch.testing.assert_close(matrix.sum(1) / matrix.sum(), rows / rows.sum())
    torch.testing.assert_close(matrix.sum(0) / matrix.sum(), columns / columns.sum())


def test_nothing_overflows_at_clips_temperature():
    similarity = torch.full((8, 8), 0.99)
    similarity[0, 0] = -0.99
    a, b = sinkhorn_biases(similarity, 0.01)
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    assert not torch.isfinite((similarity / 0.01).exp()).all()


def test_masked_items_are_as_if_absent():
    similarity = torch.rand(6, 5, generator=torch.Generator().manual_seed(3))
    rows, columns = torch.tensor([1, 1, 0, 1, 0, 1]).bool(), torch.tensor([1, 0, 1, 1, 1]).bool()
    a, b = sinkhorn_biases(similarity, 0.05, row_mask=rows, column_mask=columns)
    alone_a, alone_b = sinkhorn_biases(similarity[rows][:, columns], 0.05)
    torch.testing.assert_close(a[rows], alone_a)
    torch.testing.assert_close(b[columns], alone_b)
    assert not a[~rows].any()
    assert not b[~columns].any()


def test_half_precision_and_autocast_compute_in_float32():
    similarity = torch.rand(7, 7, generator=torch.Generator().manual_seed(4))
    a, _ = sinkhorn_biases(similarity.bfloat16(), 0.01)
    expected, _ = sinkhorn_biases(similarity.bfloat16().float(), 0.01)
    assert a.dtype == torch.float32
    assert torch.equal(a, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = sinkhorn_biases(similarity, 0.01)
    assert torch.equal(inside, sinkhorn_biases(similarity, 0.01)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "at least one iteration"),
        ({"row_marginal": torch.ones(4)}, r"row_marginal must be \(3,\)"),
        ({"column_mask": torch.ones(3).bool()}, r"column_mask must be \(2,\)"),
        ({"row_mask": torch.zeros(3).bool()}, "row_mask masks every row"),
        ({"column_marginal": torch.tensor([1.0, 0.0])}, "column_marginal must be positive"),
    ],
)
def test_what_cannot_be_balanced_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sinkhorn_biases(torch.zeros(3, 2), 0.1, **options)
    with pytest.raises(ValueError, match="rows and columns"):
        sinkhorn_biases(torch.zeros(0, 2), 0.1)
