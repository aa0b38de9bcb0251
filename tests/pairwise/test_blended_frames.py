"""Frames blended for each pair, compared with the frames of one text at a time."""

import pytest
import torch
from methods.parts import close, moved

from tvr_lightning.pairwise import (
    BlendedFrames,
    DenseFrames,
    DensePairVectors,
    PairVectors,
    PlainFrames,
    TextConditionedAttention,
)

N, M, F, D = 4, 3, 5, 12
FORMS = (DensePairVectors, PairVectors)


def blended(frames, gate, difference):
    return BlendedFrames([(None, frames), (gate, difference)])


def in_memory(frames, gate, difference):
    return DenseFrames(frames[:, None] + gate.transpose(1, 2)[..., None] * difference[:, None])


@pytest.fixture
def parts():
    torch.manual_seed(0)
    block = moved(TextConditionedAttention(D, heads=2).double().eval(), 0.3)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.double)

    mask = torch.arange(F) < torch.tensor([5, 3, 1])[:, None]
    return block, normal(N, 1, D), normal(M, F, D), normal(M, F, D), normal(M, F, N).sigmoid(), mask


@pytest.mark.parametrize("fuse", [blended, in_memory])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_blended_frames_match_those_of_one_text_at_a_time(parts, form, masked, fuse):
    block, text, frames, difference, gate, mask = parts
    mask = mask if masked else None
    queries = block.queries(text)
    fused = fuse(frames, gate, difference)
    made, cosines = block(queries, fused, mask, form).materialize(), fused.cosine(text[:, 0])
    for i in range(N):
        own = frames + gate[:, :, i : i + 1] * difference
        alone = block(queries[i : i + 1], own, mask).materialize()
        torch.testing.assert_close(made[i : i + 1], alone)
        torch.testing.assert_close(cosines[:, i], torch.cosine_similarity(own, text[i], dim=-1))
        torch.testing.assert_close(PlainFrames(own).cosine(text[i])[:, 0], cosines[:, i])


def test_gradients_agree_between_the_forms(parts):
    block, text, frames, difference, gate, mask = parts
    leaves = [x.clone().requires_grad_() for x in (text, frames, gate, difference)]
    found = []
    for form in FORMS:
        z = block(block.queries(leaves[0]), blended(*leaves[1:]), mask, form).unit()
        found.append(torch.autograd.grad(z.dot(leaves[0]).tanh().sum(), [*leaves, *block.parameters()]))
    close(*found, rtol=1e-8, atol=1e-10)
