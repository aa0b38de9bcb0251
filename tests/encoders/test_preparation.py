"""Frames are preprocessed as by open_clip for the weights of each of its tags."""

from dataclasses import replace

import open_clip
import pytest
import torch
from open_clip.pretrained import get_pretrained_cfg
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from tvr_lightning.encoders.pretrained import find_weights, frame_preprocessing, weights_follow
from tvr_lightning.media.preparation import Preparation

SIZES = [(53, 37), (31, 90), (641, 359), (33, 33), (64, 64), (1, 1), (2, 31)]
TAGS = open_clip.list_pretrained()


def known() -> dict[tuple, tuple[str, str]]:
    """Every preprocessing of the tags, with a tag that has it."""
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
