"""Vision towers that merge tokens (TempMe; its recorded cases are elsewhere) or shift patches (UCoFiA)."""

import json
from dataclasses import astuple

import pytest
import torch
from encoders.parts import openai_encoder
from parity.restated import Sizes, random_clip
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tvr_lightning.config import recipe_files
from tvr_lightning.data.batch import Media
from tvr_lightning.encoders import ClipEncoder, LoRA, TinyClipEncoder
from tvr_lightning.encoders.clip import build_model
from tvr_lightning.encoders.pretrained import model_configuration
from tvr_lightning.encoders.token_merging import TempMe, encode_frames, match, merge, merge_tokens, token_counts
from tvr_lightning.errors import UserError
from tvr_lightning.methods import CLIP4Clip, UCoFiA
from tvr_lightning.testing.processes import quiet_trainer
from tvr_lightning.testing.small import method_recipes, random_pairs, small

RECIPES = method_recipes(recipe_files.RECIPES)
SMALL = {"frames": 4, "clip_blocks": (1, 2), "joined": (2, 2)}


def encoder(**options):
    torch.manual_seed(0)
    return TinyClipEncoder(
        64, 32, text_layers=4, vision_layers=4, patch_size=8, token_merging=TempMe(**SMALL), **options
    )


def video(frames=4, items=2):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (items, frames, 3, 32, 32), generator=generator).byte()
    return Media(pixels, torch.ones(items, frames).bool())


@pytest.mark.parametrize(
    ("number", "architecture"), [(0, "ViT-B-32"), pytest.param(1, "ViT-B-16", marks=pytest.mark.slow)]
)
def test_tokens_and_operations_are_those_of_the_released_code(parity_cases, number, architecture):
    counts = json.loads((parity_cases / "tempme_counts.json").read_text())[number]
    options, side = TempMe(), 224
    rows = [list(astuple(row)[:6]) for row in token_counts(options, counts["layers"], counts["patches"])]
    assert rows == counts["rows"]
    compared = 2 * sum(  # by the cosines of the matches, which the released count leaves out
        count * (tokens // 2) * ((tokens + 1) // 2) * width
        for (clips, classes, attended, _, across, within) in rows
        for count, tokens, width in (
            (clips * (across > 0), attended + across - classes, counts["width"]),
            (clips * (within > 0), attended - classes, 64),
        )
    )
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):  # the other kernels are not counted
        model = build_model({**model_configuration(architecture), "quick_gelu": True}, "float32")
        pixels = torch.empty(1, 12, 3, side, side)
        with FlopCounterMode(display=False) as plain:
            model.visual(pixels.flatten(0, 1))
        merge_tokens(model.visual, options, architecture)
        with FlopCounterMode(display=False) as merged:
            encode_frames(model.visual, pixels)
    assert plain.get_total_flops() == 2 * counts["macs_unmerged"]["total_without_lora"]
    assert merged.get_total_flops() - compared == 2 * counts["macs"]["total_without_lora"]


def test_the_released_options_train_as_many_parameters_as_the_released_code():
    tuning = LoRA(8, 8.0, ("query", "key", "value"), shared=True)
    method = CLIP4Clip(ClipEncoder("ViT-B-32", None, token_merging=TempMe()), tuning=tuning)
    trained = [parameter.numel() for parameter in method.encoder.parameters() if parameter.requires_grad]
    assert sum(trained) == 507_648


def test_equal_tokens_are_merged_in_their_order():
    tokens = torch.ones(2, 9, 4)
    chosen = match(tokens, 1, 3)
    sources, targets, left = (places.tolist() for places in chosen)
    assert sources == [[1, 3, 5]] * 2
    assert targets == [[0, 0, 0]] * 2
    assert left == [[7, 0, 2, 4, 6]] * 2
    values = torch.arange(18.0).view(2, 9, 1).expand(-1, -1, 4)
    merged, sizes = merge(values, torch.tensor([1.0, 3, 1, 1, 2, 1, 1, 1, 1]).expand(2, -1), 1, chosen)
    assert sizes[0].tolist() == [1, 1, 7, 1, 1, 1]
    assert merged[0, :, 0].tolist() == pytest.approx([0, 8, (3 * 1 + 1 * 2 + 2 * 4 + 1 * 6) / 7, 3, 5, 7])


def test_frames_are_related_in_their_order_and_merging_is_part_of_the_fingerprint():
    merging, media = encoder().eval(), video()
    for block in merging.blocks("video"):
        if block.clip_positions is not None:
            torch.nn.init.normal_(block.clip_positions)
    backward = Media(media.pixels.flip(1), media.frame_mask)
    with torch.no_grad():
        frames, reversed_frames = (merging.encode_video(each).frames for each in (media, backward))
    assert frames.shape == (2, 4, 64)
    assert (frames - reversed_frames.flip(1)).abs().max() > 1e-3
    plain = TinyClipEncoder(64, 32, text_layers=4, vision_layers=4, patch_size=8)
    other = TinyClipEncoder(
        64, 32, text_layers=4, vision_layers=4, patch_size=8, token_merging=TempMe(**SMALL, positions=False)
    )
    for each in (plain, other):
        each.load_state_dict(merging.state_dict(), strict=False)
    assert len({each.fingerprint() for each in (merging, plain, other)}) == 3


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for options in ({}, {"gradient_checkpointing": True}):
        merging = encoder(**options).train()
        merging.encode_video(video()).frames.square().sum().backward()
        gradients.append([parameter.grad for parameter in merging.clip.visual.parameters()])
    assert all(gradient is not None for gradient in gradients[0])
    torch.testing.assert_close(*gradients)


def test_half_precision_merges_the_same_tokens():
    state = random_clip(Sizes(vision_layers=4, patch=8, side=32))
    state = {name.removeprefix("clip."): tensor for name, tensor in state.items()}
    full, half = (
        openai_encoder(state, precision, token_merging=TempMe(**SMALL)).eval() for precision in ("float32", "float16")
    )
    with torch.no_grad():
        expected, found = (each.encode_video(video()).frames for each in (full, half))
    assert (found - expected).norm() < 2e-2 * expected.norm()


WITHOUT_PATCHES = {"DPDV": "dpdv.views=[macro]", "UCoFiA": "ucofia.scores=[video_sentence, sentence_frame]"}


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=() if title == "XPool" else pytest.mark.slow) for title in RECIPES]
)
def test_every_method_trains_on_merged_tokens(title):
    section = {"class_path": "TempMe", "init_args": {**SMALL, "clip_blocks": [1, 2], "joined": [2, 2]}}
    sizes = {"width": 64, "image_size": 32, "patch_size": 8, "text_layers": 4, "vision_layers": 4}
    tiny = {"class_path": "TinyClipEncoder", "init_args": {**sizes, "token_merging": section}}
    options = [f"--model.init_args.{WITHOUT_PATCHES[title]}"] if title in WITHOUT_PATCHES else []
    module, _ = small(RECIPES[title], f"--model.init_args.encoder={json.dumps(tiny)}", *options)
    module.train()
    torch.stack([*module.losses(module.pair_features(random_pairs(module, 4))).values()]).sum().backward()
    gradients = [block.clip_positions.grad for block in module.encoder.blocks("video")[1:3]]
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TempMe(joined=(2, 2)), "must have the same length"),
        (lambda: TempMe(clip_blocks=(9, 8, 10)), "blocks must ascend"),
        (lambda: TempMe(joined=(2, 1, 3)), r"6 clips cannot be joined by 1\. Each number must be at least 2"),
        (lambda: TempMe(frames=8), "2 clips cannot be joined by 3"),
        (lambda: TempMe(removed_across=120), "TempMe.removed_across is 120; expected"),
        (lambda: token_counts(TempMe(), 10, 49), "names block 10, but the tower has only the blocks 0 to 9"),
        (
            lambda: token_counts(TempMe(removed_per_frame=10), 12, 49),
            "block 3 has only 19 patches per frame, of which 9",
        ),
        (lambda: ClipEncoder("RN50", None, token_merging=TempMe()), "needs a CLIP vision transformer .* RN50 has none"),
        (lambda: TinyClipEncoder(64, 32, vision_layers=2, token_merging=TempMe()), "names block 10"),
        (lambda: encoder().encode_video(video(6)), "merges the tokens of 4 frames, but the videos have 6"),
        (lambda: CLIP4Clip(encoder(), frames=12), "needs 4 frames per video, but frames is 12"),
        (
            lambda: quiet_trainer(max_steps=1).fit(UCoFiA(encoder(), frames=4), [video()], [video()]),
            "tiny gives no patches",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def neighbors(frame, token, step, frames):
    """Index of the frame from which the attention of `frame` takes the token at a position; the class token is 0."""
    if token >= 4 and (token - 4) % step == 0 and frame + 1 < frames:
        return frame + 1
    if token >= 1 and (token - 1) % step == 0 and frame > 0:
        return frame - 1
    return frame


def restated(visual, clip):
    """Tokens (F, L, D) of one clip (F, 3, S, S)."""
    tokens = torch.cat([visual.class_embedding.expand(len(clip), 1, -1), visual.conv1(clip).flatten(2).mT], 1)
    tokens = visual.ln_pre(tokens + visual.positional_embedding)
    frames, length = tokens.shape[:2]
    sources = [[neighbors(i, token, length // 7, frames) for token in range(length)] for i in range(frames)]
    for number, block in enumerate(visual.transformer.resblocks):
        normed = block.ln_1(tokens)
        if number in (10, 11):
            normed = normed[torch.tensor(sources), torch.arange(length)]
        tokens = tokens + block.attn(normed, normed, normed, need_weights=False)[0]
        tokens = tokens + block.mlp(block.ln_2(tokens))
    return visual.ln_post(tokens) @ visual.proj


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
    plain = encoder_of(state)
    expected = torch.stack([restated(plain.clip.visual, clip) for clip in clips])
    found = torch.cat([shifting.frames.unsqueeze(2), shifting.patches], 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (plain.encode_pixels(clips, mask).frames - shifting.frames).abs().max() > 1e-3


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
