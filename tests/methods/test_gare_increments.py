"""Measured increments: what plain operators give, with their gradients."""

import pytest
import torch

from tvr_lightning.methods.gare.increments import Increments
from tvr_lightning.pairwise import DensePairVectors, PairVectors


def increments(texts=5, videos=4, size=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(videos, texts, size, generator=generator, dtype=torch.double).transpose(0, 1).requires_grad_()


@pytest.mark.parametrize("over", [0, 1, None])
@pytest.mark.parametrize("products", [True, False])
def test_measures_and_gradients_are_those_of_plain_operators(over, products):
    vectors, found, expected = increments(), [], []
    measured = Increments(vectors, over, products)
    if products:
        unit = vectors / vectors.norm(dim=-1, keepdim=True)
        found += [measured.lengths, measured.cosines]
        expected += [vectors.norm(dim=-1), unit @ unit.transpose(1, 2)]
    if over is not None:
        found += [measured.mean, measured.deviation]
        expected += [vectors.mean(over), vectors.std(over)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    if found:
        gradients = [
            torch.autograd.grad(sum((each.sin() * place).sum() for place, each in enumerate(some, 1)), vectors)[0]
            for some in (found, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_equal_increments_have_finite_gradients():
    vectors = torch.ones(3, 4, 6).requires_grad_()
    found = Increments(vectors, over=0)
    (found.deviation.sum() + found.cosines.sum() + found.lengths.sum()).backward()
    assert vectors.grad.isfinite().all()
    nothing = torch.zeros(3, 4, 6).requires_grad_()
    found = Increments(nothing)
    (found.cosines.sum() + found.lengths.sum()).backward()
    assert nothing.grad.isfinite().all()


def test_cosines_of_vectors_in_memory_with_mixed_frames_have_the_gradients_of_plain_operators():
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(3, 5, 1, 6, generator=generator, dtype=torch.double, requires_grad=True)
    weights = torch.rand(3, 2, 5, 1, generator=generator, dtype=torch.double, requires_grad=True)
    frames = torch.randn(3, 2, 6, generator=generator, dtype=torch.double, requires_grad=True)
    found = []
    for form in (PairVectors, DensePairVectors):
        cosine = DensePairVectors(vectors).cosine(form.mix(weights, frames))
        found.append((cosine, *torch.autograd.grad(cosine.sin().sum(), [vectors, weights, frames])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
