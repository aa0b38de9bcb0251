"""Orientation of video frames: the rotation and mirroring declared in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from av.video.frame import VideoFrame
from PIL import Image

_TURNS = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}


@dataclass(frozen=True)
class Orientation:
    """Transform from a stored frame to the displayed one.

    Attributes:
        quarter_turns: Number of clockwise quarter turns, 0 to 3, applied after mirroring.
        mirrored: True if left and right are swapped first.
    """

    quarter_turns: int = 0
    mirrored: bool = False


def orientation_of(frame: VideoFrame) -> Orientation:
    """Return the orientation from the display matrix of a decoded frame (ISO/IEC 14496-12, `tkhd`).

    The matrix maps a stored pixel (x, y) to (a x + c y, b x + d y), with y pointing down. Other angles, which no camera
    writes, are rounded to quarter turns. A frame is upright if the file declares no matrix or a singular one.
    """
    # Loop over the names, since older PyAV cannot find entries by name, and the stubs list only some of the types.
    matrices = [bytes(data) for data in cast(Any, frame.side_data) if data.type.name == "DISPLAYMATRIX"]
    if not matrices:
        return Orientation()
    a, b, _, c, d = np.frombuffer(matrices[0], dtype=np.int32)[:5].astype(float)
    determinant = a * d - b * c
    if determinant == 0:
        return Orientation()
    mirrored = bool(determinant < 0)
    angle = np.degrees(np.arctan2(-b, -a) if mirrored else np.arctan2(b, a))
    return Orientation(round(angle / 90) % 4, mirrored)


def upright(image: Image.Image, orientation: Orientation) -> Image.Image:
    """Return the stored image as displayed, or the same object if there is nothing to do."""
    if orientation.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    turn = _TURNS.get(orientation.quarter_turns)
    return image if turn is None else image.transpose(turn)
