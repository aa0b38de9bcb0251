import itertools
import logging

import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import ClipEncoder, TinyClipEncoder
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.methods import XPool

CAPTIONS = ["a red ball rolls to the left", "a blue square"]


def build(architecture="tvr-test", **switches):
    torch.manual_seed(0)
    logging.disable(logging.WARNING)
    try:
        return ClipEncoder(architecture, None, **switches)
    finally:
        logging.disable(logging.NOTSET)


def media(size=32, videos=2, frames=3):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (videos, frames, 3, size, size), dtype=torch.uint8, generator=generator)
    mask = torch.ones(videos, frames, dtype=torch.bool)
    mask[-1, -1], pixels[-1, -1] = False, 0
    return Media(pixels, mask)


@pytest.mark.parametrize("architecture", ["tvr-test", "tvr-test-custom", "tvr-test-bidirectional"])
def test_sentence_and_frame_are_open_clips_own_embeddings(architecture):
    encoder = build(architecture)
    ids = open_clip.tokenize(CAPTIONS, context_length=16)
    pixels = torch.randn(2, 3, 3, 32, 32)
    text = encoder.encode_text(CAPTIONS, words=12)
    video = encoder.encode_pixels(pixels, torch.ones(2, 3))
    torch.testing.assert_close(text.sentence, encoder.clip.encode_text(ids), rtol=1e-4, atol=1e-5)
    expected = encoder.clip.encode_image(pixels.flatten(0, 1)).view(2, 3, -1)
    torch.testing.assert_close(video.frames, expected, rtol=1e-4, atol=1e-5)
    assert text.words.shape == (2, 12, encoder.dimension)
    assert video.patches is None


def test_patches_are_the_projected_tokens_behind_cls():
    encoder = build()
    pixels = torch.randn(2, 3, 3, 32, 32)
    video = encoder.encode_pixels(pixels, torch.ones(2, 3), patches=True)
    encoder.clip.visual.output_tokens = True
    frames, tokens = encoder.clip.visual(pixels.flatten(0, 1))
    expected = (tokens @ encoder.clip.visual.proj).view(2, 3, 4, 64)
    torch.testing.assert_close(video.patches, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(video.frames.flatten(0, 1), frames, rtol=1e-4, atol=1e-5)


def test_uint8_frames_are_normalised_as_open_clip_does():
    encoder = build()
    frames = media()
    settings = PreprocessCfg(size=32, mean=open_clip.OPENAI_DATASET_MEAN, std=open_clip.OPENAI_DATASET_STD)
    transform = image_transform_v2(settings, is_train=False)
    images = [transform(Image.fromarray(f.permute(1, 2, 0).numpy())) for f in frames.pixels.flatten(0, 1)]
    normalized = torch.stack(images).view(2, 3, 3, 32, 32)
    normalized[~frames.frame_mask] = 0.0  # padding is zero after normalization
    expected = encoder.encode_pixels(normalized, frames.frame_mask)
    torch.testing.assert_close(encoder.encode_video(frames).frames, expected.frames, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text_mask", [False, True])
def test_fewer_positions_give_the_same_words(text_mask):
    encoder = build(text_mask=text_mask)
    short, long = encoder.encode_text(CAPTIONS, words=10), encoder.encode_text(CAPTIONS, words=16)
    torch.testing.assert_close(short.words, long.words[:, :10], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(short.sentence, long.sentence, rtol=1e-4, atol=1e-5)
    assert torch.equal(short.word_mask, long.word_mask[:, :10])


@pytest.mark.parametrize("architecture", ["tvr-test", "tvr-test-bidirectional"])
def test_with_a_text_mask_nothing_depends_on_other_paddings(architecture):
    ids = torch.tensor([[49406, 320, 2368, 49407, 0, 0, 0]])
    other = torch.tensor([[49406, 320, 2368, 49407, 7, 8, 0]])
    for text_mask in (True, False):
        encoder = build(architecture, text_mask=text_mask)
        difference = (encoder.encode_tokens(ids).words - encoder.encode_tokens(other).words).abs().amax(-1)[0]
        assert (difference[6] < 1e-6) == text_mask
        if architecture == "tvr-test":
            assert difference[:4].max() < 1e-6  # causal: the caption never sees its padding
        else:
            assert (difference[:4].max() < 1e-6) == text_mask


def test_stored_features_pass_unchanged():
    encoder = build()
    text = TextFeatures(torch.ones(1, 64), torch.ones(1, 4, 64), torch.ones(1, 4, dtype=torch.bool))
    video = VideoFeatures(torch.ones(1, 2, 64), torch.ones(1, 2, dtype=torch.bool))
    assert encoder.encode_text(text, words=8) is text
    assert encoder.encode_video(video) is video
    with pytest.raises(ValueError, match="contain no patches"):
        encoder.encode_video(video, patches=True)


def test_wrong_input_names_the_fix():
    encoder = build()
    with pytest.raises(
        ValueError, match=r"frames are \(3, 64, 64\), but the encoder needs \(3, 32, 32\)\. Set the data's"
    ):
        encoder.encode_video(media(size=64))
    frames = media()
    frames.pixels = frames.pixels.float()
    with pytest.raises(ValueError, match=r"pixels are torch.float32; expected uint8 or float16"):
        encoder.encode_video(frames)


def test_unknown_switches_are_refused():
    with pytest.raises(ValueError, match=r"encoder_precision is 'fp16'.*float16"):
        build(encoder_precision="fp16")


def long_clip(positions: torch.Tensor) -> torch.Tensor:
    """Long-CLIP's 248 positions (model/longclip.py, load_from_clip): 20 kept, four for each other."""
    kept, last = positions[:20], positions[-1] - positions[-2]
    between = [(1 - share / 4) * a + share / 4 * b for a, b in itertools.pairwise(positions[20:]) for share in range(4)]
    return torch.stack([*kept, *between, *(positions[-1] + share / 4 * last for share in range(4))])


@pytest.mark.parametrize("architecture", ["tvr-test-77", "tvr-test-custom-77"])
def test_more_positions_are_long_clips_and_short_captions_keep_their_features(architecture):
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


def test_impossible_positions_are_refused():
    with pytest.raises(ValueError, match="positions is 64; it must be at least the 77 positions of tvr-test-77"):
        build("tvr-test-77", positions=64)
    with pytest.raises(ValueError, match="more than 20 learned positions, which tvr-test does not have"):
        build("tvr-test", positions=64)
    with pytest.raises(ValueError, match=r"words is 300, but encoder\.positions is 248\. Set words to at most 248"):
        XPool(build("tvr-test-77", positions=248), words=300)


def test_the_logit_scale_is_no_parameter():
    assert not [name for name, _ in build().named_parameters() if "logit" in name]


def test_float16_converts_the_matrices_and_nothing_else():
    encoder = build(encoder_precision="float16")
    half = {name for name, p in encoder.clip.named_parameters() if p.dtype == torch.float16}
    parts = ("in_proj_", "out_proj.", "c_fc.", "c_proj.", "conv1.")
    names = {name for name, _ in encoder.clip.named_parameters()}
    assert half == {n for n in names if any(p in n for p in parts) or n in ("text_projection", "visual.proj")}


def test_float16_gives_float32_features_close_to_those_of_float32():
    full, half = build(), build(encoder_precision="float16")
    frames = media()
    for exact, rounded in (
        (full.encode_text(CAPTIONS, 12).words, half.encode_text(CAPTIONS, 12).words),
        (full.encode_video(frames).frames, half.encode_video(frames).frames),
    ):
        assert rounded.dtype == torch.float32
        error = (exact - rounded).norm() / exact.norm()
        assert 1e-5 < error < 1e-2


def test_float16_refuses_mixed_precision_sharding_and_other_towers():
    ClipEncoder.check_trainer("32-true", "ddp", encoder_precision="float16")
    with pytest.raises(ValueError, match=r"not with trainer\.precision bf16-mixed\. Add .*variants/float32\.yaml"):
        ClipEncoder.check_trainer("bf16-mixed", "auto", encoder_precision="float16")
    for strategy in ("fsdp", "ModelParallelStrategy"):
        with pytest.raises(ValueError, match=f"not with strategy {strategy}"):
            TinyClipEncoder.check_trainer("32-true", strategy, encoder_precision="float16")
    for architecture in ("RN50", "ViT-B-16-SigLIP2", "PE-Core-B-16", "xlm-roberta-base-ViT-B-32"):
        with pytest.raises(ValueError, match=f"CLIP's own transformers, not for {architecture}"):
            ClipEncoder.check_trainer("32-true", "auto", architecture=architecture, encoder_precision="float16")
    ClipEncoder.check_trainer("bf16-mixed", "fsdp", architecture="ViT-B-16-SigLIP2")


def saved_bytes_and_gradients(encoder):
    total = 0

    def pack(tensor):
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        text, video = encoder.encode_text(CAPTIONS, 12), encoder.encode_video(media())
        loss = (text.sentence @ video.frames.mean(1).T).square().mean()
    loss.backward()
    return total, [parameter.grad for parameter in encoder.parameters()]


@pytest.mark.parametrize("architecture", ["tvr-test", "tvr-test-custom"])
def test_gradient_checkpointing_keeps_gradients_and_saves_memory(architecture):
    plain, expected = saved_bytes_and_gradients(build(architecture))
    saved, gradients = saved_bytes_and_gradients(build(architecture, gradient_checkpointing=True))
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference)
    assert saved < plain / 2


@pytest.mark.parametrize("text_mask", [False, True])
def test_features_under_autocast_are_float32(text_mask):
    encoder = build(text_mask=text_mask)
    exact = encoder.encode_text(CAPTIONS, 12).words
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text, video = encoder.encode_text(CAPTIONS, 12), encoder.encode_video(media(), patches=True)
    assert text.words.dtype == video.frames.dtype == video.patches.dtype == torch.float32
    assert 0 < (text.words - exact).norm() / exact.norm() < 0.05


def test_temporal_initialization_is_the_start_of_the_text_transformer():
    encoder = build(encoder_precision="float16")
    start = encoder.temporal_initialization(1)
    assert len(start.blocks) == 1
    assert start.heads == 1
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


def test_half_precision_masters_are_for_clips_own_transformers():
    for architecture in ("tvr-test-resnet", "PE-Core-T-16-384"):
        with pytest.raises(ValueError, match=f"CLIP's own transformers, not for {architecture}"):
            build(architecture, encoder_precision="float16")


def test_batch_norms_of_a_frozen_encoder_stand_still():
    for still in (True, False):
        encoder = build("tvr-test-resnet").requires_grad_(not still).train()
        before = encoder.fingerprint()
        encoder.encode_video(media(size=64))
        assert (encoder.fingerprint() == before) == still


def test_fingerprint_changes_with_what_changes_features_only():
    encoder = build()
    same = build(gradient_checkpointing=True).requires_grad_(False)
    assert encoder.fingerprint() == same.fingerprint()
    others = [build(text_mask=True), build("tvr-test-quickgelu"), build(encoder_precision="float16")]
    assert len({e.fingerprint() for e in [encoder, *others]}) == 4
    with torch.no_grad():
        same.clip.ln_final.bias[0] += 1e-6
    assert encoder.fingerprint() != same.fingerprint()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_pixels_are_normalised_as_clip_does_in_the_precision_of_the_step(dtype, tolerance):
    encoder = build()
    pixels = torch.randint(0, 256, (2, 3, 3, 32, 32), dtype=torch.uint8)
    expected = (pixels / 255 - encoder.pixel_mean) / encoder.pixel_std
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        normalised = encoder._normalized(pixels)
    assert normalised.dtype == dtype
    torch.testing.assert_close(normalised.float(), expected, rtol=0, atol=tolerance)
