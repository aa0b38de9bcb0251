import pytest
import torch
from methods.parts import moved
from torch import nn

from tvr_lightning.pairwise import DensePairVectors, PairVectors, TextConditionedAttention

N, M, F, Q, D = 4, 3, 5, 2, 16
FORMS = (PairVectors, DensePairVectors)


def attention(**options):
    torch.manual_seed(0)
    return moved(TextConditionedAttention(D, **options).double()).eval()


def conditioned(block, form, text, frames, mask=None):
    return block(block.queries(text), frames, mask, form).materialize()


@pytest.fixture
def features():
    torch.manual_seed(1)
    return torch.randn(N, Q, D, dtype=torch.double), torch.randn(M, F, D, dtype=torch.double)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_matches_multi_head_attention_of_torch(features, form, heads):
    text, frames = features
    block = attention(heads=heads, projections=True)
    torch_block = nn.MultiheadAttention(D, heads, batch_first=True).double()
    projections = block.cross_attn
    with torch.no_grad():
        names = ("q_proj", "k_proj", "v_proj")
        torch_block.in_proj_weight.copy_(torch.cat([projections[name].weight for name in names]))
        torch_block.in_proj_bias.copy_(torch.cat([projections[name].bias for name in names]))
    torch_block.out_proj.load_state_dict(projections["out_proj"].state_dict())
    made = conditioned(block, form, text, frames)
    for i in range(N):
        for j in range(M):
            context = block.layer_norm1(frames[j])
            mixed, _ = torch_block(block.layer_norm1(text[i]), context, context)
            hidden = block.layer_norm2(mixed)
            expected = block.layer_norm3(hidden + block.linear_proj(hidden))
            torch.testing.assert_close(made[i, j], expected)


def test_projections_start_as_identities_or_normal():
    identity = TextConditionedAttention(D)
    layers = (identity.linear_proj, *identity.cross_attn.values())
    assert len(layers) == 5
    for layer in layers:
        assert torch.equal(layer.weight, torch.eye(D))
        assert not layer.bias.any()
    normal = TextConditionedAttention(256, projections=False, initialization="normal")
    assert not normal.cross_attn
    assert 0.019 < float(normal.linear_proj.weight.detach().std()) < 0.021
