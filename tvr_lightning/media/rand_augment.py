"""RandAugment with the settings of GARE's code for the frames of a clip: `rand-m7-n4-mstd0.5-inc1`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Operation = Literal[
    "auto-contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize-add", "colour", "contrast",
    "brightness", "sharpness", "shear-x", "shear-y", "translate-x", "translate-y",
]  # fmt: skip

_MAGNITUDE = 7.0
_MAGNITUDE_STD = 0.5
_MAGNITUDE_MAX = 10.0
_OPERATIONS = 4
_PROBABILITY = 0.5
# Color of the pixels that enter the frame from outside.
_FILL = (128, 128, 128)


@dataclass(frozen=True)
class Step:
    """One sampled operation.

    Attributes:
        operation: Name of the operation.
        strength: Strength from 0 (none) to 1 (the maximum that is defined for the operation).
        sign: 1 or -1, the direction of operations that have one.
    """

    operation: Operation
    strength: float
    sign: int


@dataclass(frozen=True)
class RandAugment:
    """Sampled operations, applied in order and identically to every frame.

    Attributes:
        steps: Up to 4 operations.
    """

    steps: tuple[Step, ...]

    def __call__(self, frame: Image.Image) -> Image.Image:
        """Return an RGB frame after all operations, in the same size."""
        for step in self.steps:
            frame = apply_step(frame, step)
        return frame


def draw_rand_augment(generator: np.random.Generator) -> RandAugment:
    """Sample the operations for every frame of one clip.

    Four of fifteen operations are sampled with replacement, and each is applied with probability 1/2, at a magnitude
    from the normal distribution N(7, 0.5) clipped to 0 to 10. The strength of every operation increases with the
    magnitude (`inc1`). This is the meaning of the configuration string in timm's RandAugment (after Cubuk et al.,
    arXiv:1909.13719). The released code contains its video version, with bicubic resampling and a gray border.
    """
    steps = []
    for operation in generator.choice(np.array(get_args(Operation)), _OPERATIONS):
        applied = bool(generator.random() < _PROBABILITY)
        magnitude = float(np.clip(generator.normal(_MAGNITUDE, _MAGNITUDE_STD), 0, _MAGNITUDE_MAX))
        sign = 1 if generator.random() < 0.5 else -1
        if applied:
            steps.append(Step(str(operation), magnitude / _MAGNITUDE_MAX, sign))  # type: ignore[arg-type]
    return RandAugment(tuple(steps))


def apply_step(frame: Image.Image, step: Step) -> Image.Image:
    """Apply one operation to an RGB frame and keep its size.

    Ranges: rotation up to 30 degrees, shear up to 0.3, translation up to 0.45 of the side, enhancement by
    factors from 0.1 to 1.9, posterization from 4 down to 0 bits, solarization from 256 down to 0, addition up to 110.
    """
    signed = step.strength * step.sign
    if step.operation in _ENHANCERS:
        return _ENHANCERS[step.operation](frame).enhance(1 + 0.9 * signed)
    if step.operation in ("rotate", "shear-x", "shear-y", "translate-x", "translate-y"):
        return _move(frame, step, signed)
    return _recolour(frame, step)


_ENHANCERS: dict[Operation, Callable[[Image.Image], ImageEnhance._Enhance]] = {
    "colour": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}


def _move(frame: Image.Image, step: Step, signed: float) -> Image.Image:
    resample = Image.Resampling.BICUBIC
    if step.operation == "rotate":
        return frame.rotate(30 * signed, resample=resample, fillcolor=_FILL)
    shear, shift = 0.3 * signed, 0.45 * signed
    matrix = {
        "shear-x": (1, shear, 0, 0, 1, 0),
        "shear-y": (1, 0, 0, shear, 1, 0),
        "translate-x": (1, 0, shift * frame.width, 0, 1, 0),
        "translate-y": (1, 0, 0, 0, 1, shift * frame.height),
    }[step.operation]
    return frame.transform(frame.size, Image.Transform.AFFINE, matrix, resample=resample, fillcolor=_FILL)


def _recolour(frame: Image.Image, step: Step) -> Image.Image:
    if step.operation == "auto-contrast":
        return ImageOps.autocontrast(frame)
    if step.operation == "equalize":
        return ImageOps.equalize(frame)
    if step.operation == "invert":
        return ImageOps.invert(frame)
    if step.operation == "posterize":
        kept = 4 - int(4 * step.strength)
        return frame.point([value & (0xFF << (8 - kept)) & 0xFF for value in range(256)] * 3)
    if step.operation == "solarize":
        return ImageOps.solarize(frame, 256 - int(256 * step.strength))
    added = int(110 * step.strength)
    return frame.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)
