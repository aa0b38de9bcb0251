"""How a frame of any size becomes the square that an encoder takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from PIL import Image

Interpolation = Literal["bicubic", "bilinear"]
ResizeMode = Literal["shortest", "longest", "squash"]
"""How a frame that is not square becomes one.

- `shortest`: the short side is resized to S, the long one in proportion; the centre square is kept (CLIP).
- `longest`: the long side is resized to S, the short one in proportion; black fills the rest.
- `squash`: both sides are resized to S, so that a wide frame looks narrower (SigLIP, CLIPA, PE-Core).
"""

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
_MODES = {
    "shortest": "shortest side, centre crop",
    "longest": "longest side, black borders",
    "squash": "both sides, squashed",
}


@dataclass(frozen=True)
class Preparation:
    """What weights of an image tower were trained with: size, filter and mode of the resizing, antialiased.

    Equal to the resizing and cropping of open_clip's `image_transform` on PIL images, pixel for pixel.

    Attributes:
        image_size: S, pixels.
        interpolation: filter of the resizing.
        resize_mode: what happens to frames that are not square.

    Raises:
        ValueError: no such filter or mode, or no size.
    """

    image_size: int
    interpolation: Interpolation = "bicubic"
    resize_mode: ResizeMode = "shortest"

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size is {self.image_size}; it must be at least 1")
        for name, kind in (("interpolation", Interpolation), ("resize_mode", ResizeMode)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(kind))}")

    def __call__(self, frame: Image.Image) -> Image.Image:
        """Return an RGB frame as (S, S)."""
        size, (width, height) = self.image_size, frame.size
        if self.resize_mode == "squash":
            scaled = (size, size)
        elif self.resize_mode == "longest":
            ratio = max(width / size, height / size)
            scaled = (round(width / ratio), round(height / ratio))
        else:
            wide = width >= height
            scaled = (int(size * width / height), size) if wide else (size, int(size * height / width))
        if scaled != frame.size:
            frame = frame.resize(scaled, _FILTERS[self.interpolation])
        if self.resize_mode == "longest":
            square = Image.new(frame.mode, (size, size))
            square.paste(frame, ((size - scaled[0]) // 2, (size - scaled[1]) // 2))
            return square
        left, top = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
        return frame.crop((left, top, left + size, top + size))

    def describe(self) -> str:
        """Return it in words, as fingerprints of stored features hold it."""
        return f"{self.image_size} pixels, {self.interpolation} {_MODES[self.resize_mode]}"


PREPARATION = tuple(field.name for field in fields(Preparation))
"""Options of a preparation; the encoder knows them, and recipes hand them on to the data."""
