"""Decoding of all frames of a video file, and conversion of frames to upright images."""

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from PIL import Image

from tvr_lightning.media.container import MAX_PIXELS, TimeBudget, VideoError, open_video, packets_of

MAX_ELONGATION = 100  # maximum ratio of the long side of a frame to the short one, since resizing keeps the ratio

# By clockwise quarter turns, without and with swapping left and right before.
_TURNED = (None, Image.Transpose.ROTATE_270, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_90)
_MIRRORED = (
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE,
)


def orientation_of(frame: VideoFrame) -> Image.Transpose | None:
    """Return the transform to the displayed frame, from its display matrix (ISO/IEC 14496-12, `tkhd`), or None.

    The matrix maps a stored pixel (x, y) to (a x + c y, b x + d y), with y pointing down. Other angles, which no camera
    writes, are rounded to quarter turns. A frame is upright if the file declares no matrix or a singular one.
    """
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")  # whose stub has no buffer
    if matrix is None:
        return None
    a, b, _, c, d = np.frombuffer(bytes(matrix), dtype=np.int32)[:5].astype(float)
    determinant = a * d - b * c
    if determinant < 0:
        return _MIRRORED[round(np.degrees(np.arctan2(-b, -a)) / 90) % 4]
    return _TURNED[round(np.degrees(np.arctan2(b, a)) / 90) % 4] if determinant else None


def upright_image(path: Path, reformatter: VideoReformatter, frame: VideoFrame) -> Image.Image:
    """Return a frame of a file as an upright image in mode RGB, equal to PyAV's `to_image`, but several times faster.

    A reformatter reuses its expensive conversion tables. One thread, since pools of many workers slow each other down;
    three bytes per pixel, since FFmpeg's conversion to four does not write the last columns for some widths.
    """
    check_shape(path, frame)
    converted = reformatter.reformat(frame, format="rgb24", threads=1)
    plane = converted.planes[0]
    size = (converted.width, converted.height)
    image = Image.frombytes("RGB", size, plane, "raw", "RGB", plane.line_size, 1)  # type: ignore[arg-type]
    orientation = orientation_of(frame)
    return image if orientation is None else image.transpose(orientation)


def check_shape(path: Path, frame: VideoFrame) -> None:
    """Raise VideoError if one side of a frame is much longer than the other."""
    if max(frame.width, frame.height) > MAX_ELONGATION * min(frame.width, frame.height):
        found = f"its frames have {frame.width:,} x {frame.height:,} pixels"
        raise VideoError(path, f"{found}; one side may be at most {MAX_ELONGATION} times the other")


def frames_in_order(
    stream: VideoStream, packets: Iterable["av.Packet[Any] | None"], budget: TimeBudget
) -> Generator[VideoFrame, None, None]:
    """Yield every frame decoded from packets of a fresh stream, in display order; the last packet is empty or None."""
    time = None
    try:
        for packet in packets:
            budget.check()
            for frame in stream.codec_context.decode(packet):
                if frame.is_corrupt:
                    raise VideoError(budget.path, f"the frame at {frame.time} s is damaged")
                time = frame.time
                with budget.paused():
                    yield frame
    except av.FFmpegError as error:
        where = "" if time is None else f" past {time:.2f} s"
        # If FFmpeg rejects the size of a frame, the width is 0.
        too_large = f"it is damaged or too large: the maximum is {MAX_PIXELS:,} pixels, 8192 x 4352"
        reason = error.strerror if stream.codec_context.width else too_large
        raise VideoError(budget.path, f"cannot be decoded{where} ({reason})") from error


def decoded_frames(budget: TimeBudget) -> Generator[VideoFrame, None, None]:
    """Yield every frame of a file in display order."""
    with open_video(budget.path) as (container, stream):
        yield from frames_in_order(stream, packets_of(container, budget, stream), budget)
