import pytest
import torch
from methods.parts import FORMS, moved
from torch import nn

from tvr_lightning.pairwise import TextConditionedAttention

N, M, F, Q, D = 4, 3, 5, 2, 16


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_matches_multi_head_attention_of_torch(form, heads):
    torch.manual_seed(0)
    text, frames = torch.randn(N, Q, D, dtype=torch.double), torch.randn(M, F, D, dtype=torch.double)
    block = moved(TextConditionedAttention(D, heads=heads).double()).eval()
    torch_block = nn.MultiheadAttention(D, heads, batch_first=True).double()
    projections = block.cross_attn
    with torch.no_grad():
        names = ("q_proj", "k_proj", "v_proj")
        torch_block.in_proj_weight.copy_(torch.cat([projections[name].weight for name in names]))
        torch_block.in_proj_bias.copy_(torch.cat([projections[name].bias for name in names]))
    torch_block.out_proj.load_state_dict(projections["out_proj"].state_dict())
    made = block(block.queries(text), frames, None, form).materialize()
    for i in range(N):
        for j in range(M):
            context = block.layer_norm1(frames[j])
            mixed, _ = torch_block(block.layer_norm1(text[i]), context, context)
            hidden = block.layer_norm2(mixed)
            expected = block.layer_norm3(hidden + block.linear_proj(hidden))
            torch.testing.assert_close(made[i, j], expected)


def test_projections_start_as_identities_by_default():
    identity = TextConditionedAttention(D)
    layers = (identity.linear_proj, *identity.cross_attn.values())
    assert len(layers) == 5
    for layer in layers:
        assert torch.equal(layer.weight, torch.eye(D))
        assert not layer.bias.any()
