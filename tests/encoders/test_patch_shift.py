"""Patch shift of UCoFiA, compared with its definition, patch by patch and frame by frame."""

import pytest
import torch
from encoders.parts import openai_encoder
from parity.restated import Sizes, attention, norm, random_clip, with_mlp

from tvr_lightning.encoders import ClipEncoder

BLOCK = "clip.visual.transformer.resblocks"


def neighbors(frame, token, step, frames):
    """Index of the frame from which the attention of `frame` takes the token at a position; the class token is 0."""
    if token >= 4 and (token - 4) % step == 0 and frame + 1 < frames:
        return frame + 1
    if token >= 1 and (token - 1) % step == 0 and frame > 0:
        return frame - 1
    return frame


def restated(state, clip, layers, patch):
    """Tokens (F, L, D) of one clip (F, 3, S, S), one head of width 64."""
    tokens = []
    for image in clip:
        cells = torch.nn.functional.conv2d(image[None], state["clip.visual.conv1.weight"], stride=patch)[0]
        cells = torch.cat([state["clip.visual.class_embedding"][None], cells.flatten(1).T])
        tokens.append(norm(cells + state["clip.visual.positional_embedding"], state, "clip.visual.ln_pre"))
    frames, length = len(tokens), len(tokens[0])
    for n in range(layers):
        name = f"{BLOCK}.{n}"
        normed = [norm(x, state, f"{name}.ln_1") for x in tokens]
        if n in (10, 11):
            normed = [
                torch.stack([normed[neighbors(i, token, length // 7, frames)][token] for token in range(length)])
                for i in range(frames)
            ]
        for i, y in enumerate(normed):
            tokens[i] = with_mlp(tokens[i] + attention(y, state, name), state, name)
    return torch.stack([norm(x, state, "clip.visual.ln_post") @ state["clip.visual.proj"] for x in tokens])


def checkpoint(side, layers=12):
    return {name: tensor.double() for name, tensor in random_clip(Sizes(vision_layers=layers, side=side)).items()}


def encoder_of(state, double=True, **switches):
    clip = {name.removeprefix("clip."): tensor if double else tensor.float() for name, tensor in state.items()}
    encoder = openai_encoder(clip, **switches).eval()
    return encoder.double() if double else encoder


@pytest.mark.parametrize(("side", "layers"), [(16, 12), (20, 13), (28, 12)])  # 17, 26 and 50 tokens: steps 2, 3 and 7
@torch.no_grad()
def test_the_last_blocks_shift_patches_as_defined(side, layers):
    state = checkpoint(side, layers)
    clips = torch.randn(2, 4, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()  # padded frames are neighbors too
    shifting = encoder_of(state, patch_shift=True).encode_pixels(clips, mask, patches=True)
    expected = torch.stack([restated(state, clip, layers, 4) for clip in clips])
    found = torch.cat([shifting.frames.unsqueeze(2), shifting.patches], 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    alone = encoder_of(state).encode_pixels(clips, mask)
    assert (alone.frames - shifting.frames).abs().max() > 1e-3


def test_gradient_checkpointing_shifts_the_same_patches():
    state = checkpoint(16)
    clips, mask = torch.randn(2, 3, 3, 16, 16, dtype=torch.float64), torch.ones(2, 3).bool()
    gradients = []
    for checkpointing in (False, True):
        encoder = encoder_of(state, patch_shift=True, gradient_checkpointing=checkpointing).train()
        encoder.encode_pixels(clips, mask).frames.square().sum().backward()
        gradients.append(encoder.clip.visual.conv1.weight.grad)
    torch.testing.assert_close(*gradients)


def test_patch_shift_is_in_the_fingerprint_and_other_towers_refuse_it():
    state = checkpoint(16)
    clips, mask = torch.randn(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3).bool()
    precisions = ("float32", "float16")
    full, half = (encoder_of(state, patch_shift=True, encoder_precision=each, double=False) for each in precisions)
    with torch.no_grad():
        expected, found = (encoder.encode_pixels(clips, mask).frames for encoder in (full, half))
    assert (found - expected).norm() < 1e-2 * expected.norm()
    assert encoder_of(state, patch_shift=True).fingerprint() != encoder_of(state).fingerprint()
    with pytest.raises(ValueError, match=r"encoder\.patch_shift needs a CLIP vision transformer .* RN50 does not have"):
        ClipEncoder("RN50", weights=None, patch_shift=True)
    with pytest.raises(ValueError, match="at least 11 blocks"):
        encoder_of(checkpoint(16, layers=10), patch_shift=True)
