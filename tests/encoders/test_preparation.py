"""Frames are preprocessed as by open_clip for each of its tags, and augmented equally in a whole clip."""

from dataclasses import replace

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.pretrained import get_pretrained_cfg
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize
from torchvision.transforms.functional import resized_crop

from tvr_lightning.encoders.pretrained import find_weights, frame_preprocessing, weights_follow
from tvr_lightning.media.augment import draw_augmentation, draw_rand_augment
from tvr_lightning.media.preparation import Preparation

SIZES = [(53, 37), (31, 90), (641, 359), (33, 33), (64, 64), (1, 1), (2, 31)]
KNOWN: dict[tuple, tuple[str, str]] = {}
"""Every preprocessing of open_clip's tags, with a tag that has it."""

for architecture, tag in open_clip.list_pretrained():
    preset = get_pretrained_cfg(architecture, tag)
    size = open_clip.get_model_config(architecture)["vision_cfg"]["image_size"]
    kind = (preset["mean"], preset["std"], preset["interpolation"], preset["resize_mode"], size)
    KNOWN.setdefault(kind, (architecture, tag))


def picture(width: int, height: int) -> Image.Image:
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    noise = torch.rand(height, width, generator=torch.Generator().manual_seed(width))
    return Image.fromarray((255 * torch.stack([rows, columns, noise], dim=-1)).byte().numpy())


def difference(frame: Image.Image, size: int, pixels: PreprocessCfg) -> float:
    """Maximum difference of open_clip's transform and ours."""
    theirs = image_transform_v2(replace(pixels, size=size), is_train=False)(frame)
    values = torch.from_numpy(Preparation(size, pixels.interpolation, pixels.resize_mode)(frame).copy())
    mean, std = torch.tensor(pixels.mean).view(3, 1, 1), torch.tensor(pixels.std).view(3, 1, 1)
    return float((theirs - (values.permute(2, 0, 1) / 255 - mean) / std).abs().max())


@pytest.mark.parametrize("kind", KNOWN, ids=[" ".join(names) for names in KNOWN.values()])
def test_frames_equal_those_of_open_clip(kind):
    architecture, tag = KNOWN[kind]
    with weights_follow():
        pixels = find_weights(architecture, tag).pixels
    assert (pixels.mean, pixels.std, pixels.interpolation, pixels.resize_mode) == kind[:4]
    longest = PreprocessCfg(interpolation=pixels.interpolation, resize_mode="longest")  # leaves black borders
    for size in SIZES:
        assert difference(picture(*size), kind[-1], pixels) < 1e-6
        assert difference(picture(*size), 32, longest) < 1e-6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"interpolation": "random"}, "interpolation 'random'.*Supported: bicubic, bilinear"),
        ({"resize_mode": "stretch"}, "resize_mode 'stretch'.*Supported: shortest, longest, squash"),
        ({"fill_color": 127}, "fill_color 127, which is not supported"),
        ({"mode": "L"}, "mode 'L', which is not supported"),
        ({"mean": [0.5]}, "has a mean of 1 channels; expected RGB"),
    ],
)
def test_unsupported_preprocessing_is_refused(settings, said):
    with pytest.raises(ValueError, match=f"open_clip's tag mine .*{said}"):
        frame_preprocessing(settings, "open_clip's tag mine")


def test_preprocessing_is_described_and_impossible_options_are_refused():
    modes, filters = ("shortest", "longest", "squash"), ("bicubic", "bilinear")
    assert len({Preparation(32, kind, mode).describe() for kind in filters for mode in modes}) == 6
    plain = "224 pixels, bicubic shortest side, center crop"
    assert Preparation(224).describe() == plain
    assert Preparation(224, antialias=False).describe() == f"{plain}, not antialiased"
    with pytest.raises(ValueError, match="image_size is 0"):
        Preparation(0)


@pytest.mark.parametrize("augmentation", ["crop-flip", "rand-augment"])
def test_a_transform_depends_on_its_seed_only(augmentation: str) -> None:
    frame = picture(96, 64)
    transforms = [
        draw_augmentation(augmentation, Preparation(32), np.random.default_rng(seed)) for seed in (3, 3, 4, 5, 6)
    ]
    results = [np.asarray(transform(frame)) for transform in transforms]
    assert all(result.shape == (32, 32, 3) for result in results)
    assert draw_augmentation("none", Preparation(32), np.random.default_rng(0)) == Preparation(32)
    np.testing.assert_array_equal(results[0], np.asarray(transforms[0](frame)), "a transform is deterministic")
    np.testing.assert_array_equal(results[0], results[1], "the same seed gives the same transform")
    assert any((results[0] != result).any() for result in results[2:])


@given(st.integers(8, 400), st.integers(8, 400), st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_crops_are_in_the_frame_and_have_at_least_half_its_area(width: int, height: int, seed: int) -> None:
    transform = draw_augmentation("crop-flip", Preparation(32), np.random.default_rng(seed))
    left, top, right, bottom = transform.box(width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    if max(width, height) <= 2 * min(width, height):
        assert w * h >= 0.5 * width * height - (w + h)
    assert 3 / 4 - 2 / h <= w / h <= 4 / 3 + 2 / h


@pytest.mark.parametrize("antialias", [True, False])
def test_crops_and_flips_equal_torchvision_with_and_without_antialiasing(antialias: bool) -> None:
    frame = picture(301, 203)
    image = frame if antialias else torch.from_numpy(np.array(frame)).permute(2, 0, 1).float() / 255
    preparation = Preparation(64, antialias=antialias)
    crop = draw_augmentation("crop-flip", preparation, np.random.default_rng(1))
    left, top, right, bottom = crop.box(301, 203)
    whole = CenterCrop(64)(Resize(64, interpolation=InterpolationMode.BICUBIC, antialias=antialias)(image))
    part = resized_crop(image, top, left, bottom - top, right - left, [64, 64], antialias=antialias)
    whole, part = (np.asarray(x) if antialias else 255 * x.permute(1, 2, 0).numpy() for x in (whole, part))
    for transform, expected in (
        (preparation, whole),
        (replace(crop, flip=False), part),
        (replace(crop, flip=True), part[:, ::-1]),
    ):
        found = transform(frame)
        assert found.dtype == (np.uint8 if antialias else np.float16)
        # Half a step of float16 above 256
        assert np.abs(found.astype(float) - expected).max() <= (0 if antialias else 0.126)
    assert antialias or (whole.min() < 0 and whole.max() > 255), "bicubic overshoots, and nothing is clamped"


def test_half_of_the_clips_are_flipped() -> None:
    generator = np.random.default_rng(0)
    flips = [draw_augmentation("crop-flip", Preparation(8), generator).flip for _ in range(400)]
    assert 150 < sum(flips) < 250


def test_four_operations_are_applied_half_of_the_time_with_gray_borders() -> None:
    generator, frame = np.random.default_rng(0), Image.new("RGB", (32, 24), (200, 90, 10))
    state = np.random.get_state()[1].tolist()
    found = [np.asarray(draw_rand_augment(generator)(frame)) for _ in range(400)]
    assert np.random.get_state()[1].tolist() == state
    unchanged = np.mean([(pixels == np.asarray(frame)).all() for pixels in found])
    # Of fifteen operations, auto-contrast, equalize, and sharpness do not change a frame of one color.
    assert unchanged == pytest.approx((0.5 + 0.5 * 3 / 15) ** 4, abs=0.05)
    assert any((pixels[:, :4] == 128).all() or (pixels[:, -4:] == 128).all() for pixels in found)
