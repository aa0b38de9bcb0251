"""Conversion of a frame of any size to the input of an encoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from tvr_lightning.option_types import Count, check

Interpolation = Literal["bicubic", "bilinear"]
SquareMode = Literal["shortest", "longest", "squash"]
ResizeMode = Literal[SquareMode, "unchanged", "undecoded"]
"""Rules for resizing a frame that is not square.

- `shortest`: the short side is resized to S, the long one in proportion; the center square is kept (CLIP).
- `longest`: the long side is resized to S, the short one in proportion; the rest is black.
- `squash`: both sides are resized to S, so that a wide frame looks narrower (SigLIP, CLIPA, PE-Core).
- `unchanged`: the frame keeps its size, and its encoder resizes it (models that take videos).
- `undecoded`: as `unchanged`; in datasets, the encoder gets files and selects their frames itself (MTEB's models).
"""

Pixels = NDArray[np.uint8] | NDArray[np.float16]
"""RGB pixels (height, width, 3) from 0 to 255; if resized without antialiasing, float16 that can exceed that range."""
FrameTransform = Callable[[Image.Image], Pixels]
"""Transform from an RGB frame of any size to pixels (S, S, 3), or (H, W, 3) if it stays unchanged."""

_MODES = {
    "shortest": "shortest side, center crop",
    "longest": "longest side, black borders",
    "squash": "both sides, squashed",
}


@dataclass(frozen=True)
class Preparation:
    """Size, filter, and mode of the resizing that an encoder was trained with.

    Identical to the resizing and cropping of open_clip's `image_transform` on PIL images, pixel for pixel. Without
    antialiasing, identical to X-Pool and T-MASS with the torchvision of their time: tensors resized in floating point,
    neither rounded nor clamped.
    """

    image_size: Count  # S in pixels
    interpolation: Interpolation = "bicubic"
    resize_mode: ResizeMode = "shortest"
    antialias: bool = True

    def __post_init__(self) -> None:
        check(self)

    @property
    def is_square(self) -> bool:
        """Whether all frames get the same size."""
        return self.resize_mode not in ("unchanged", "undecoded")

    def __call__(self, frame: Image.Image) -> Pixels:
        """Return an RGB frame as (S, S, 3), or unchanged as (H, W, 3)."""
        if not self.is_square:
            return np.asarray(frame)
        size = self.image_size
        sides = frame.size
        if self.resize_mode == "squash":
            scaled = (size, size)
        elif self.resize_mode == "longest":
            ratio = max(side / size for side in sides)
            scaled = (round(sides[0] / ratio), round(sides[1] / ratio))
        else:
            scaled = (int(size * sides[0] / min(sides)), int(size * sides[1] / min(sides)))
        pixels = resized(frame, scaled, self.interpolation, self.antialias)
        if self.resize_mode == "longest":
            square = np.zeros((size, size, 3), dtype=pixels.dtype)
            left, top = (size - scaled[0]) // 2, (size - scaled[1]) // 2
            square[top : top + scaled[1], left : left + scaled[0]] = pixels
            return square
        left, top = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
        return pixels[top : top + size, left : left + size]

    def describe(self) -> str:
        """Return a description, which is part of the fingerprints of stored features."""
        if not self.is_square:
            return "frames in their own size" + (" that the encoder selects" if self.resize_mode == "undecoded" else "")
        resizing = f"{self.image_size} pixels, {self.interpolation} {_MODES[self.resize_mode]}"
        return resizing if self.antialias else f"{resizing}, not antialiased"


def resized(frame: Image.Image, size: tuple[int, int], interpolation: Interpolation, antialias: bool) -> Pixels:
    """Return the pixels of a frame resized to a width and height."""
    if antialias:
        return np.asarray(frame if size == frame.size else frame.resize(size, Image.Resampling[interpolation.upper()]))
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None].float()
    if size != frame.size:
        pixels = functional.interpolate(pixels, size[::-1], mode=interpolation, align_corners=False)
    return pixels[0].permute(1, 2, 0).half().numpy()
