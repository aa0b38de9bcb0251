"""Attention over blends: all pairs at once against one pair at a time."""

import pytest
import torch

from tvr_lightning.methods.gaid.gated import GatedAttention, blended_square
from tvr_lightning.pairwise import DensePairVectors, PairVectors

N, M, F, D = 4, 3, 5, 12


@pytest.fixture
def parts():
    torch.manual_seed(0)
    block = GatedAttention(D, heads=2).double().eval()
    for parameter in block.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.double)

    mask = torch.arange(F) < torch.tensor([5, 3, 1])[:, None]
    return block, normal(N, 1, D), normal(M, F, D), normal(M, F, D), normal(M, F, N).sigmoid(), mask


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("form", [DensePairVectors, PairVectors])
def test_blended_frames_are_attended_to_as_if_they_were_built(parts, form, masked):
    block, text, frames, difference, gate, mask = parts
    mask = mask if masked else None
    queries = block.queries(text)
    made = block.blended(form.from_texts(queries, videos=M), frames, difference, gate, mask).materialize()
    for i in range(N):
        fused = frames + gate[:, :, i : i + 1] * difference
        alone = block(DensePairVectors.from_texts(queries[i : i + 1], videos=M), fused, mask).materialize()
        torch.testing.assert_close(made[i : i + 1], alone)


def test_each_pair_is_the_same_attention(parts):
    block, text, frames, difference, gate, mask = parts
    queries = block.queries(text)
    fused = frames.unsqueeze(1) + gate.transpose(1, 2).unsqueeze(-1) * difference.unsqueeze(1)  # (M, N, F, D)
    made = block.each_pair(queries[:, 0], fused, mask).materialize()
    blended = block.blended(PairVectors.from_texts(queries, videos=M), frames, difference, gate, mask)
    torch.testing.assert_close(made, blended.materialize())
    own = block.each_pair(queries[:M], frames.unsqueeze(1), mask).materialize()[0, :, 0]
    whole = block(DensePairVectors.from_texts(queries[:M], videos=M), frames, mask).materialize()[:, :, 0]
    torch.testing.assert_close(own, whole.diagonal().T)


def test_gradients_agree_between_the_forms(parts):
    block, text, frames, difference, gate, mask = parts
    leaves = [x.clone().requires_grad_() for x in (text, frames, difference, gate)]
    found = []
    for form in (DensePairVectors, PairVectors):
        queries = form.from_texts(block.queries(leaves[0]), videos=M)
        z = block.blended(queries, *leaves[1:], mask).unit()
        found.append(torch.autograd.grad(z.dot(leaves[0]).tanh().sum(), [*leaves, *block.parameters()]))
    for fast, dense in zip(*found, strict=True):
        torch.testing.assert_close(fast, dense, rtol=1e-8, atol=1e-10)


def test_the_square_of_a_blend_is_that_of_its_vectors(parts):
    _, _, frames, difference, gate, _ = parts
    fused = frames.unsqueeze(2) + gate.unsqueeze(-1) * difference.unsqueeze(2)
    torch.testing.assert_close(blended_square(frames, difference, gate), fused.square().sum(-1))
