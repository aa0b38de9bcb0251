"""The way up of a video frame: the turn and mirroring that its file asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from av.video.frame import VideoFrame
from PIL import Image

_TURNS = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}


@dataclass(frozen=True)
class Orientation:
    """How a stored frame becomes the one that is shown.

    Attributes:
        quarter_turns: quarter turns clockwise, 0 to 3, applied after mirroring.
        mirrored: whether left and right are exchanged first.
    """

    quarter_turns: int = 0
    mirrored: bool = False


def orientation_of(frame: VideoFrame) -> Orientation:
    """Read the display matrix that a decoded frame carries (ISO/IEC 14496-12, `tkhd`).

    The matrix maps a stored pixel (x, y) to (a x + c y, b x + d y), y downwards. Angles between quarter turns, which no
    camera writes, go to the nearest one.

    Args:
        frame: a decoded frame.

    Returns:
        Its orientation; upright where the file says nothing or the matrix is singular.
    """
    # By name in a loop: older PyAV finds no entry by its name, and the stubs list fewer kinds than there are.
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
    """Return the image as it is to be shown.

    Args:
        image: the stored frame.
        orientation: how it is to be turned and mirrored.

    Returns:
        The same image where nothing is to be done.
    """
    if orientation.mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    turn = _TURNS.get(orientation.quarter_turns)
    return image if turn is None else image.transpose(turn)
