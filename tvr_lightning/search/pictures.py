"""The small pictures that an index shows of its videos, in their true shape."""

from __future__ import annotations

import io

from PIL import Image
from torch import Tensor

from tvr_lightning.media.preparation import Pixels, Preparation

LONGEST_SIDE = 320
"""Pixels."""


def thumbnail(picture: Image.Image) -> bytes:
    """Return a small JPEG of a picture of mode RGB, its sides in proportion."""
    small = picture.copy()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


class FramePreparer:
    """Prepares frames for an encoder and keeps a small picture of each, so that a video is decoded once.

    Args:
        preparation: what the encoder takes.
    """

    def __init__(self, preparation: Preparation) -> None:
        self.preparation = preparation
        self.size = (0, 0)
        self._kept: dict[bytes, bytes] = {}

    def __call__(self, picture: Image.Image) -> Pixels:
        """Return a frame as the encoder takes it."""
        square = self.preparation(picture)
        self.size = picture.size
        self._kept[square.tobytes()] = thumbnail(picture)
        return square

    def of(self, pixels: Tensor) -> bytes:
        """Return the JPEG of a frame, which is known by its prepared pixels (3, S, S)."""
        return self._kept[pixels.permute(1, 2, 0).contiguous().numpy().tobytes()]
