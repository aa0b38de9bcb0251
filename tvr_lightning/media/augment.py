"""Augmentation of the frames of a training clip, in addition to the encoder's preparation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from tvr_lightning.media.preparation import FrameTransform, Pixels, Preparation, resized

Augmentation = Literal["none", "crop-flip", "rand-augment"]
"""Augmentations of a training clip, identical for all of its frames.

- `none`: only the encoder's preparation (`Preparation`).
- `crop-flip`: a random crop of 0.5 to 1 of the area and a flip with probability 1/2 (X-Pool, T-MASS, GAID:
  `datasets/model_transforms.py`, whose color jitter has zero strength). A flip contradicts captions that mention left
  or right.
- `rand-augment`: RandAugment `rand-m7-n4-mstd0.5-inc1` on the whole frame, then the encoder's preparation (GARE's code;
  its paper mentions no augmentation).
"""


@dataclass(frozen=True)
class CropFlip:
    """A crop of random position, area, and ratio, resized to (S, S) and possibly mirrored, the same for every frame.

    It follows torchvision's `RandomResizedCrop(S, scale=(0.5, 1))` and `RandomHorizontalFlip`, but stores the random
    numbers as fractions, so that they apply to frames of any size.
    """

    image_size: int
    draws: NDArray[np.float64]  # (10, 4), uniform in [0, 1): area, ratio, top, and left of each attempt
    flip: bool
    antialias: bool = True

    def __call__(self, frame: Image.Image) -> Pixels:
        """Return the crop of an RGB frame as (S, S, 3)."""
        # Cropped first, since `resize(box=...)` would include pixels from outside the crop.
        cropped = frame.crop(self.box(*frame.size))
        pixels = resized(cropped, (self.image_size, self.image_size), "bilinear", self.antialias)
        return pixels[:, ::-1] if self.flip else pixels

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, right, and bottom of the crop, in pixels of a frame of this size."""
        for area_draw, ratio_draw, top_draw, left_draw in self.draws:
            area = width * height * (0.5 + 0.5 * area_draw)
            ratio = (4 / 3) ** (2 * ratio_draw - 1)  # log-uniform from 3/4 to 4/3
            w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(left_draw * (width - w + 1)), int(top_draw * (height - h + 1))
                return left, top, left + w, top + h
        w = min(width, round(height * 4 / 3))
        h = min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


_FILL = (128, 128, 128)  # color of the pixels that enter the frame from outside


def _affine(frame: Image.Image, *matrix: float) -> Image.Image:
    resample = Image.Resampling.BICUBIC
    return frame.transform(frame.size, Image.Transform.AFFINE, matrix, resample=resample, fillcolor=_FILL)


def _solarize_add(frame: Image.Image, strength: float) -> Image.Image:
    return frame.point(lambda value: min(255, value + int(110 * strength)) if value < 128 else value)


OPERATIONS: dict[str, Callable[[Image.Image, float, float], Image.Image]] = {
    "auto-contrast": lambda frame, strength, signed: ImageOps.autocontrast(frame),
    "equalize": lambda frame, strength, signed: ImageOps.equalize(frame),
    "invert": lambda frame, strength, signed: ImageOps.invert(frame),
    "rotate": lambda frame, strength, signed: frame.rotate(30 * signed, Image.Resampling.BICUBIC, fillcolor=_FILL),
    "posterize": lambda frame, strength, signed: frame.point(lambda value: value & (0xFF << (4 + int(4 * strength)))),
    "solarize": lambda frame, strength, signed: ImageOps.solarize(frame, 256 - int(256 * strength)),
    "solarize-add": lambda frame, strength, signed: _solarize_add(frame, strength),
    "color": lambda frame, strength, signed: ImageEnhance.Color(frame).enhance(1 + 0.9 * signed),
    "contrast": lambda frame, strength, signed: ImageEnhance.Contrast(frame).enhance(1 + 0.9 * signed),
    "brightness": lambda frame, strength, signed: ImageEnhance.Brightness(frame).enhance(1 + 0.9 * signed),
    "sharpness": lambda frame, strength, signed: ImageEnhance.Sharpness(frame).enhance(1 + 0.9 * signed),
    "shear-x": lambda frame, strength, signed: _affine(frame, 1, 0.3 * signed, 0, 0, 1, 0),
    "shear-y": lambda frame, strength, signed: _affine(frame, 1, 0, 0, 0.3 * signed, 1, 0),
    "translate-x": lambda frame, strength, signed: _affine(frame, 1, 0, 0.45 * signed * frame.width, 0, 1, 0),
    "translate-y": lambda frame, strength, signed: _affine(frame, 1, 0, 0, 0, 1, 0.45 * signed * frame.height),
}
"""Functions of an RGB frame, a strength from 0 (none) to 1 (maximum), and the strength with its sign, if it has one."""


@dataclass(frozen=True)
class Step:
    """One sampled operation of `OPERATIONS`; `sign` is 1 or -1."""

    operation: str
    strength: float
    sign: int

    def __call__(self, frame: Image.Image) -> Image.Image:
        """Return an RGB frame after the operation, in the same size."""
        return OPERATIONS[self.operation](frame, self.strength, self.strength * self.sign)


def draw_rand_augment(generator: np.random.Generator) -> list[Step]:
    """Sample the operations for every frame of one clip, to be applied in order.

    Four of fifteen operations are sampled with replacement, and each is applied with probability 1/2, at a magnitude
    from the normal distribution N(7, 0.5) clipped to 0 to 10. The strength of every operation increases with the
    magnitude (`inc1`). This is the meaning of the configuration string in timm's RandAugment (after Cubuk et al.,
    arXiv:1909.13719). The released code contains its video version, with bicubic resampling and a gray border.
    """
    steps = []
    for operation in generator.choice(np.array(list(OPERATIONS)), 4):
        applied = generator.random() < 0.5
        strength = float(np.clip(generator.normal(7.0, 0.5), 0.0, 10.0)) / 10.0
        sign = 1 if generator.random() < 0.5 else -1
        if applied:
            steps.append(Step(str(operation), strength, sign))
    return steps


def draw_augmentation(
    augmentation: Augmentation, preparation: Preparation, generator: np.random.Generator
) -> FrameTransform:
    """Sample the transform from an RGB frame to (S, S, 3), the same for all frames of a clip."""
    if augmentation == "crop-flip":
        draws = generator.random((10, 4))
        flip = bool(generator.random() < 0.5)
        return CropFlip(preparation.image_size, draws, flip, preparation.antialias)
    if augmentation == "rand-augment":
        steps = draw_rand_augment(generator)
        return lambda frame: preparation(reduce(lambda changed, step: step(changed), steps, frame))
    return preparation
