"""Augmentation of the frames of a training clip, in addition to the encoder's preparation."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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


def draw_rand_augment(generator: np.random.Generator) -> Callable[[Image.Image], Image.Image]:
    """Sample a change for every frame of one clip, by timm's RandAugment (Cubuk et al., arXiv:1909.13719).

    Four of fifteen operations are sampled with replacement, and each is applied with probability 1/2, at a magnitude
    from the normal distribution N(7, 0.5) clipped to 0 to 10. Resampling is bicubic and borders are gray, as in the
    released code's version for videos.
    """
    # Imports that take a second, which other augmentations save.
    from lightning.pytorch.utilities.seed import isolate_rng
    from timm.data.auto_augment import rand_augment_transform

    seed = int(generator.integers(2**32))
    options = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BICUBIC}
    transform = rand_augment_transform("rand-m7-n4-mstd0.5-inc1", options)

    def change(frame: Image.Image) -> Image.Image:
        with isolate_rng(include_cuda=False):  # timm uses the global generators
            random.seed(seed)
            np.random.seed(seed)
            changed: Image.Image = transform(frame)
            return changed

    return change


def draw_augmentation(
    augmentation: Augmentation, preparation: Preparation, generator: np.random.Generator
) -> FrameTransform:
    """Sample the transform from an RGB frame to (S, S, 3), the same for all frames of a clip."""
    if augmentation == "crop-flip":
        draws = generator.random((10, 4))
        flip = bool(generator.random() < 0.5)
        return CropFlip(preparation.image_size, draws, flip, preparation.antialias)
    if augmentation == "rand-augment":
        change = draw_rand_augment(generator)
        return lambda frame: preparation(change(frame))
    return preparation
