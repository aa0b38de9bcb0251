"""The encoder of CLIP models: patches, precision, longer captions, its fingerprint, and the memory of its blocks."""

import copy
import itertools

import pytest
import torch
from encoders.parts import random_media
from open_clip.model import convert_weights_to_fp16
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU, ResidualAttentionBlock

from tvr_lightning.encoders import ClipEncoder
from tvr_lightning.encoders.lean_blocks import save_activations
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods import XPool

CAPTIONS = ["a red ball rolls to the left", "a blue square"]


def build(architecture="tvr-test", **switches):
    torch.manual_seed(0)
    return ClipEncoder(architecture, None, **switches)


def test_patches_are_the_projected_tokens_after_the_class_token():
    encoder, pixels = build(), torch.randn(2, 3, 3, 32, 32)
    video, plain = (encoder.encode_pixels(pixels, torch.ones(2, 3), patches=patches) for patches in (True, False))
    torch.testing.assert_close(plain.frames, video.frames)
    assert plain.patches is None
    encoder.clip.visual.output_tokens = True
    _, tokens = encoder.clip.visual(pixels.flatten(0, 1))
    expected = (tokens @ encoder.clip.visual.proj).view(2, 3, 4, -1)
    torch.testing.assert_close(video.patches, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_pixels_are_normalized_in_the_precision_of_the_step(dtype, tolerance):
    encoder, frames = build(), random_media()
    expected = (frames.pixels / 255 - encoder.pixel_mean) / encoder.pixel_std
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = encoder._normalized(frames.pixels)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)
    expected[~frames.frame_mask] = 0.0
    features = encoder.encode_pixels(expected, frames.frame_mask).frames
    torch.testing.assert_close(encoder.encode_video(frames).frames, features, rtol=1e-4, atol=1e-5)


def test_stored_features_are_returned_unchanged_and_wrong_input_is_refused():
    encoder, frames = build(), random_media()
    text = TextFeatures(torch.ones(1, 64), torch.ones(1, 4, 64), torch.ones(1, 4, dtype=torch.bool))
    video = VideoFeatures(torch.ones(1, 2, 64), torch.ones(1, 2, dtype=torch.bool))
    assert encoder.encode_text(text, words=8) is text
    assert encoder.encode_video(video) is video
    with pytest.raises(ValueError, match="contain no patches"):
        encoder.encode_video(video, patches=True)
    with pytest.raises(
        ValueError, match=r"frames are \(3, 64, 64\), but the encoder needs \(3, 32, 32\)\. Set the data"
    ):
        encoder.encode_video(random_media(size=64))
    frames.pixels = frames.pixels.float()
    with pytest.raises(ValueError, match=r"pixels are torch.float32; expected uint8 or float16"):
        encoder.encode_video(frames)


@pytest.mark.parametrize(
    ("architecture", "switches", "message"),
    [
        ("tvr-test", {"encoder_precision": "fp16"}, r"encoder_precision is 'fp16'.*float16"),
        ("tvr-test-77", {"positions": 64}, "positions is 64; it must be at least the 77 positions of tvr-test-77"),
        ("tvr-test", {"positions": 64}, "more than 20 learned positions, which tvr-test does not have"),
        *((name, {"encoder_precision": "float16"}, f"CLIP's own transformers, not for {name}")
          for name in ("tvr-test-resnet", "PE-Core-T-16-384")),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(architecture, switches, message):
    with pytest.raises(ValueError, match=message):
        build(architecture, **switches)


def long_clip(positions: torch.Tensor) -> torch.Tensor:
    """The 248 positions of Long-CLIP (model/longclip.py, load_from_clip): 20 kept, four for each other one."""
    kept, last = positions[:20], positions[-1] - positions[-2]
    between = [(1 - share / 4) * a + share / 4 * b for a, b in itertools.pairwise(positions[20:]) for share in range(4)]
    return torch.stack([*kept, *between, *(positions[-1] + share / 4 * last for share in range(4))])


@pytest.mark.parametrize("architecture", ["tvr-test-77", "tvr-test-custom-77"])
def test_more_positions_follow_long_clip_and_keep_features_of_short_captions(architecture):
    plain, long = build(architecture), build(architecture, positions=248)
    own, other = (encoder._text.positional_embedding for encoder in (plain, long))
    torch.testing.assert_close(other, long_clip(own))
    for a, b in zip(plain.parameters(), long.parameters(), strict=True):
        assert torch.equal(a, b) or a is own
    twenty = "a red ball" + " rolls" * 15
    for words in (20, 77):
        short, same = (encoder.encode_text([*CAPTIONS, twenty], words) for encoder in (plain, long))
        torch.testing.assert_close(same.sentence, short.sentence, rtol=0, atol=1e-6)
        torch.testing.assert_close(same.words[:, :20], short.words[:, :20], rtol=0, atol=1e-6)
    paragraph = "a red ball" + " rolls and bounces" * 60
    assert long.encode_text([paragraph], 248).word_mask.sum() == 245
    assert long.caption_tokens(248)([paragraph]).needed == [245]
    assert build(architecture, positions=77).fingerprint() == plain.fingerprint()
    with pytest.raises(ValueError, match=r"words is 300, but encoder\.positions is 248\. Set words to at most 248"):
        XPool(long, words=300)


def test_float16_converts_matrices_and_returns_float32_features():
    full, half, frames = build(), build(encoder_precision="float16"), random_media()
    found = {name for name, p in half.clip.named_parameters() if p.dtype == torch.float16}
    parts = ("in_proj_", "out_proj.", "c_fc.", "c_proj.", "conv1.")
    names = {name for name, _ in half.clip.named_parameters()}
    assert found == {n for n in names if any(p in n for p in parts) or n in ("text_projection", "visual.proj")}
    for exact, rounded in (
        (full.encode_text(CAPTIONS, 12).words, half.encode_text(CAPTIONS, 12).words),
        (full.encode_video(frames).frames, half.encode_video(frames).frames),
    ):
        assert rounded.dtype == torch.float32
        error = (exact - rounded).norm() / exact.norm()
        assert 1e-5 < error < 1e-2


@pytest.mark.parametrize("text_mask", [False, True])
def test_features_under_autocast_are_float32(text_mask):
    encoder = build(text_mask=text_mask)
    exact = encoder.encode_text(CAPTIONS, 12).words
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text, video = encoder.encode_text(CAPTIONS, 12), encoder.encode_video(random_media(), patches=True)
    assert text.words.dtype == video.frames.dtype == video.patches.dtype == torch.float32
    assert 0 < (text.words - exact).norm() / exact.norm() < 0.05


def test_temporal_layers_start_as_those_of_the_text_transformer():
    encoder = build(encoder_precision="float16")
    start = encoder.temporal_initialization(1)
    assert (len(start.blocks), start.heads) == (1, 1)
    text = encoder.clip.state_dict()
    for name, tensor in start.blocks[0].items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, text[f"transformer.resblocks.0.{name}"].float())
    assert torch.equal(start.positional_embedding, encoder.clip.positional_embedding)
    start.positional_embedding.zero_()
    assert encoder.clip.positional_embedding.abs().sum() > 0
    with pytest.raises(ValueError, match="3 temporal layers were requested, but the text transformer has only 2"):
        encoder.temporal_initialization(3)
    assert build("tvr-test-bidirectional").temporal_initialization(1) is None  # text width 64, frames 32


def test_the_fingerprint_depends_on_options_that_change_features():
    encoder = build()
    same = build(gradient_checkpointing=True).requires_grad_(False)
    assert encoder.fingerprint() == same.fingerprint()
    others = [build(text_mask=True), build("tvr-test-quickgelu"), build(encoder_precision="float16")]
    assert len({e.fingerprint() for e in [encoder, *others]}) == 4
    with torch.no_grad():
        same.clip.ln_final.bias[0] += 1e-6
    assert encoder.fingerprint() != same.fingerprint()


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
