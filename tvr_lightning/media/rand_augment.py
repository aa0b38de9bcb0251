"""RandAugment with the settings of GARE's code for the frames of a clip: `rand-m7-n4-mstd0.5-inc1`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

_MAGNITUDE = 7.0
_MAGNITUDE_STD = 0.5
_MAGNITUDE_MAX = 10.0
_COUNT = 4
_PROBABILITY = 0.5
# Color of the pixels that enter the frame from outside.
_FILL = (128, 128, 128)


def _affine(frame: Image.Image, *matrix: float) -> Image.Image:
    resample = Image.Resampling.BICUBIC
    return frame.transform(frame.size, Image.Transform.AFFINE, matrix, resample=resample, fillcolor=_FILL)


def _posterize(frame: Image.Image, strength: float) -> Image.Image:
    kept = 4 - int(4 * strength)
    return frame.point([value & (0xFF << (8 - kept)) & 0xFF for value in range(256)] * 3)


def _solarize_add(frame: Image.Image, strength: float) -> Image.Image:
    added = int(110 * strength)
    return frame.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


OPERATIONS: dict[str, Callable[[Image.Image, float, float], Image.Image]] = {
    "auto-contrast": lambda frame, strength, signed: ImageOps.autocontrast(frame),
    "equalize": lambda frame, strength, signed: ImageOps.equalize(frame),
    "invert": lambda frame, strength, signed: ImageOps.invert(frame),
    "rotate": lambda frame, strength, signed: frame.rotate(30 * signed, Image.Resampling.BICUBIC, fillcolor=_FILL),
    "posterize": lambda frame, strength, signed: _posterize(frame, strength),
    "solarize": lambda frame, strength, signed: ImageOps.solarize(frame, 256 - int(256 * strength)),
    "solarize-add": lambda frame, strength, signed: _solarize_add(frame, strength),
    "colour": lambda frame, strength, signed: ImageEnhance.Color(frame).enhance(1 + 0.9 * signed),
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
    for operation in generator.choice(np.array(list(OPERATIONS)), _COUNT):
        applied = generator.random() < _PROBABILITY
        magnitude = float(np.clip(generator.normal(_MAGNITUDE, _MAGNITUDE_STD), 0, _MAGNITUDE_MAX))
        sign = 1 if generator.random() < 0.5 else -1
        if applied:
            steps.append(Step(str(operation), magnitude / _MAGNITUDE_MAX, sign))
    return steps
