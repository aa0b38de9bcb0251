"""CLIP's blocks save about half of the activations and compute the same."""

import copy

import pytest
import torch
from open_clip.model import convert_weights_to_fp16
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU, ResidualAttentionBlock

from tvr_lightning.encoders.lean_blocks import save_activations

B, L, D = 3, 16, 128
UNIT = B * L * D * 2  # bytes of half-precision vectors


def made(half):
    torch.manual_seed(0)
    norm = LayerNormFp32 if half else LayerNorm
    block = ResidualAttentionBlock(D, 2, act_layer=QuickGELU, norm_layer=norm, batch_first=not half)
    if half:
        convert_weights_to_fp16(block)
    lean = copy.deepcopy(block)
    save_activations(torch.nn.ModuleList([lean]))
    return block, lean


def masks(dtype):
    causal = torch.full((L, L), float("-inf")).triu(1).to(dtype)
    return {"none": None, "causal": causal, "of each text": causal.expand(2 * B, L, L).contiguous()}


def run(block, x, mask):
    """Output, gradients, and bytes saved for the backward pass in units."""
    saved, own = {}, {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage, storage.nbytes()
        return tensor

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(x, attn_mask=mask)
    gradients = torch.autograd.grad((output * torch.linspace(-1, 1, D)).sum(), [x, *block.parameters()])
    return [output, *gradients], sum(size for key, (_, size) in saved.items() if key not in own) / UNIT


@pytest.mark.parametrize("mask", ["none", "causal", "of each text"])
@pytest.mark.parametrize("half", [False, True])
def test_outputs_and_gradients_are_equal_with_about_half_the_memory(half, mask):
    block, lean = made(half)
    dtype = torch.float16 if half else torch.float32
    x = torch.randn((L, B, D) if half else (B, L, D)).to(dtype)
    expected, before = run(block, x, masks(dtype)[mask])
    found, after = run(lean, x, masks(dtype)[mask])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if half else 1e-6 * other.detach().abs().max().item())
    assert after < 0.62 * before


def test_blocks_compute_under_autocast_and_without_gradients():
    block, lean = made(half=False)
    x = torch.randn(B, L, D)
    with torch.autocast("cpu", torch.bfloat16):
        (expected, _), (found, _) = run(block, x, None), run(lean, x, None)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    with torch.no_grad():
        assert torch.equal(lean(x), block(x))
