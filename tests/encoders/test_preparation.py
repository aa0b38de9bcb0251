"""Frames are prepared exactly as open_clip prepares images for the weights of each of its tags."""

from dataclasses import asdict, replace

import open_clip
import pytest
import torch
from open_clip.pretrained import get_pretrained_cfg
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from tvr_lightning.encoders.pretrained import find_weights, frame_preprocessing, weights_follow
from tvr_lightning.media.preparation import Preparation

SIZES = [(53, 37), (31, 90), (641, 359), (33, 33), (64, 64)]
TAGS = open_clip.list_pretrained()


def known() -> dict[tuple, tuple[str, str]]:
    """Every preparation among the tags, with one that has it."""
    found: dict[tuple, tuple[str, str]] = {}
    for architecture, tag in TAGS:
        settings = get_pretrained_cfg(architecture, tag)
        size = open_clip.get_model_config(architecture)["vision_cfg"]["image_size"]
        kind = (settings["mean"], settings["std"], settings["interpolation"], settings["resize_mode"], size)
        found.setdefault(kind, (architecture, tag))
    return found


KNOWN = known()


def picture(width: int, height: int) -> Image.Image:
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    noise = torch.rand(height, width, generator=torch.Generator().manual_seed(width))
    return Image.fromarray((255 * torch.stack([rows, columns, noise], dim=-1)).byte().numpy())


def prepared(frame: Image.Image, preparation: Preparation, pixels: PreprocessCfg) -> torch.Tensor:
    values = torch.from_numpy(preparation(frame).copy())
    mean, std = torch.tensor(pixels.mean).view(3, 1, 1), torch.tensor(pixels.std).view(3, 1, 1)
    return (values.permute(2, 0, 1) / 255 - mean) / std


def difference(frame: Image.Image, size: int, pixels: PreprocessCfg) -> float:
    """Of open_clip's transform and ours."""
    theirs = image_transform_v2(replace(pixels, size=size), is_train=False)(frame)
    ours = prepared(frame, Preparation(size, pixels.interpolation, pixels.resize_mode), pixels)
    return float((theirs - ours).abs().max())


@pytest.mark.parametrize("kind", KNOWN, ids=[" ".join(names) for names in KNOWN.values()])
def test_frames_are_those_of_open_clips_own_transform(kind):
    architecture, tag = KNOWN[kind]
    with weights_follow():
        pixels = find_weights(architecture, tag).pixels
    for size in SIZES:
        assert difference(picture(*size), kind[-1], pixels) < 1e-6


def test_every_tag_keeps_its_own_preparation():
    for architecture, tag in TAGS:
        settings = get_pretrained_cfg(architecture, tag)
        if architecture.endswith("-quickgelu") and not settings.get("quick_gelu"):
            continue  # refused, as the name asks for another activation
        with weights_follow():
            found = asdict(find_weights(architecture, tag).pixels)
        names = ("mean", "std", "interpolation", "resize_mode")
        assert {name: found[name] for name in names} == {name: settings[name] for name in names}


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_the_longest_side_leaves_black_borders(interpolation):
    pixels = PreprocessCfg(interpolation=interpolation, resize_mode="longest")
    for size in SIZES:
        assert difference(picture(*size), 32, pixels) < 1e-6


def test_preparations_are_told_apart_in_words():
    modes, filters = ("shortest", "longest", "squash"), ("bicubic", "bilinear")
    assert len({Preparation(32, kind, mode).describe() for kind in filters for mode in modes}) == 6
    assert Preparation(224).describe() == "224 pixels, bicubic shortest side, centre crop"
    assert (
        Preparation(224, antialias=False).describe()
        == "224 pixels, bicubic shortest side, centre crop, not antialiased"
    )


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
def test_a_preparation_that_is_unknown_is_named(settings, said):
    with pytest.raises(ValueError, match=f"open_clip's tag mine .*{said}"):
        frame_preprocessing(settings, "open_clip's tag mine")


def test_impossible_options_of_the_data_are_named():
    with pytest.raises(ValueError, match=r"resize_mode is stretch; it must be one of shortest, longest, squash"):
        Preparation(32, resize_mode="stretch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="image_size is 0"):
        Preparation(0)
