"""Measures of increments and cosines of corrected texts, against plain operators."""

import pytest
import torch
from methods.parts import close

from tvr_lightning.methods.gare.increments import Increments
from tvr_lightning.pairwise import DensePairVectors, PairVectors, tiles


def increments(texts=5, videos=4, size=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(videos, texts, size, generator=generator, dtype=torch.double).transpose(0, 1).requires_grad_()


@pytest.fixture(params=[tiles.TILE, 50], ids=["one tile", "several tiles"], autouse=True)
def tile(request, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", request.param)


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("used", [slice(4), slice(2), slice(2, 4)], ids=["all", "products", "moments"])
def test_measures_and_gradients_match_plain_operators(over, used):
    vectors = increments()
    measured = Increments(vectors, over)
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    found = [measured.lengths, measured.cosines, measured.mean, measured.deviation]
    expected = [vectors.norm(dim=-1), unit @ unit.transpose(1, 2), vectors.mean(over), vectors.std(over)]
    close(found, expected)
    gradients = [
        torch.autograd.grad(sum((each.sin() * place).sum() for place, each in enumerate(some[used], 1)), vectors)[0]
        for some in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("slots", [1, 2])
def test_cosines_of_corrected_texts_have_the_gradients_of_plain_operators(slots):
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.double, requires_grad=True)

    vectors, texts, weights, frames = drawn(3, 5, slots, 6), drawn(5, 1, 6), drawn(3, 2, 5, slots), drawn(3, 2, 6)
    for corrects in (True, False):
        found = []
        for form in (PairVectors, DensePairVectors):
            corrected = DensePairVectors(vectors)
            if corrects:
                corrected = form.from_texts(texts, videos=3) + corrected
            cosine = corrected.cosine(form.mix(weights, frames))
            ask = [vectors, weights, frames, texts]
            found.append((cosine, *torch.autograd.grad(cosine.sin().sum(), ask, materialize_grads=True)))
        close(*found)
