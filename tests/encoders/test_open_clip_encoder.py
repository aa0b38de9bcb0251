"""The encoder of CLIP models: patches, precision, captions, fingerprint, memory, compiled towers, and sharding."""

import copy
import itertools
import math
import re
import shutil
import warnings

import pytest
import torch
from encoders.parts import random_media
from open_clip.model import convert_weights_to_fp16
from open_clip.transformer import LayerNorm, LayerNormFp32, QuickGELU, ResidualAttentionBlock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from tvr_lightning.encoders import ClipEncoder, TinyClipEncoder
from tvr_lightning.encoders.lean_blocks import save_activations
from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.layers.temperature import Temperature
from tvr_lightning.methods import XPool
from tvr_lightning.testing import run_processes
from tvr_lightning.training.sharding import shard as shard_method

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


def test_shapes_are_as_configured():
    encoder = TinyClipEncoder(width=128, image_size=48, patch_size=16, text_layers=5, context_length=20)
    assert (encoder.dimension, encoder.image_size, encoder.context_length) == (128, 48, 20)
    assert encoder.encode_video(random_media(48), patches=True).patches.shape == (2, 3, 9, 128)
    assert encoder.encode_text(["a red ball", "a blue box"], 20).words.shape == (2, 20, 128)
    assert len(encoder.temporal_initialization(5).blocks) == 5
    assert len(encoder.clip.visual.transformer.resblocks) == 4


def test_weights_can_come_from_a_run(tmp_path):
    trained = TinyClipEncoder(width=64, image_size=32, vision_layers=1)
    state = {f"encoder.{name}": value for name, value in trained.state_dict().items()}
    torch.save({"state_dict": state | {"head.weight": torch.ones(2)}}, tmp_path / "last.ckpt")
    path = str(tmp_path / "last.ckpt")
    started = TinyClipEncoder(width=64, image_size=32, vision_layers=1, trained_in=path)
    assert started.fingerprint() == trained.fingerprint()
    with pytest.raises(ValueError, match="multiple of 64"):
        TinyClipEncoder(width=100)
    with pytest.raises(ValueError, match="50 must be a multiple"):
        TinyClipEncoder(image_size=50)
    with pytest.raises(ValueError, match="does not fit"):
        TinyClipEncoder(width=64, image_size=32, vision_layers=2, trained_in=path)
    with pytest.raises(UserError, match="there is no checkpoint"):
        TinyClipEncoder(width=64, trained_in=str(tmp_path / "absent.ckpt"))


def encoder(compile_towers: bool) -> TinyClipEncoder:
    torch.manual_seed(0)
    return TinyClipEncoder(width=64, image_size=32, text_layers=1, vision_layers=1, compile_towers=compile_towers)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.filterwarnings("ignore")  # deprecations in torch's compiler
def test_compiled_towers_have_the_same_features_and_gradients():
    found = []
    for compiled in (False, True):
        made = encoder(compiled)
        text, video = (
            made.encode_text(["a cat", "two dogs run", "rain"], 12),
            made.encode_video(random_media(), patches=True),
        )
        (text.words.square().mean() + video.patches.square().mean() + video.frames.square().mean()).backward()
        found.append((text.words, video.frames, {k: p.grad for k, p in made.named_parameters()}, made.state_dict()))
    plain, compiled = found
    torch.testing.assert_close(compiled[0], plain[0])
    torch.testing.assert_close(compiled[1], plain[1])
    assert compiled[3].keys() == plain[3].keys()
    for name, gradient in plain[2].items():
        torch.testing.assert_close(compiled[2][name], gradient, msg=lambda m, n=name: f"{n}: {m}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # of texts and of frames


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Triton compiles")
@pytest.mark.filterwarnings("ignore")  # deprecations in torch's compiler
def test_towers_run_uncompiled_if_compiling_fails(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "a-compiler-that-is-not-there"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        made = encoder(True)
        video = made.encode_video(random_media())
    torch._dynamo.reset()
    torch.testing.assert_close(video.frames, encoder(False).encode_video(random_media()).frames)
    made.encode_text(["a cat"], 12)
    (line,) = [record.message for record in caplog.records if "compile_towers" in record.message]
    assert re.fullmatch(r"compile_towers: torch\.compile failed \(.*the towers run uncompiled", line)


def outputs(encoder):
    text = encoder.encode_text(["a red ball", "a blue box"], 8)
    video = encoder.encode_video(random_media(), patches=True)
    return [text.sentence, text.words, video.frames, video.patches]


def shard(rank):
    """Compute with sharded units as before torch 2.13, whose FSDP2 failed on GPUs in calls without arguments."""
    plain = FSDPState._root_pre_forward

    def failing(self, module, arguments, options):
        assert arguments or options
        return plain(self, module, arguments, options)

    FSDPState._root_pre_forward = failing
    warnings.simplefilter("error")
    torch.manual_seed(0)
    encoder, temperature = TinyClipEncoder(width=64, image_size=32), Temperature(2.0)
    fingerprint, expected = encoder.fingerprint(), [tensor.detach() for tensor in outputs(encoder)]
    shard_method(torch.nn.ModuleList([encoder, temperature]), init_device_mesh("cpu", (2,)))
    sharded = outputs(encoder)
    equal = all(torch.equal(found, wanted) for found, wanted in zip(sharded, expected, strict=True))
    sum(tensor.square().mean() for tensor in sharded).backward()
    complete = all(parameter.grad is not None for parameter in encoder.parameters())
    temperature.clamp()
    temperature().backward()
    return [equal, complete, encoder.fingerprint() == fingerprint, temperature.logit_scale.grad.full_tensor().item()]


def test_sharded_units_compute_and_train_as_whole_ones():
    for *kept, gradient in run_processes(shard, 2):
        assert kept == [True] * 3
        assert gradient == pytest.approx(math.exp(2.0))
