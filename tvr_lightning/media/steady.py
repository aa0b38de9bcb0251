"""Frames of a whole file at a constant rate, one after another, for files of any duration."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from av.video.frame import VideoFrame
from PIL import Image

from tvr_lightning.media.container import MAX_ELONGATION, MAX_SECONDS, TimeBudget, VideoError
from tvr_lightning.media.decoder import FrameConverter, decoded_frames
from tvr_lightning.media.orientation import orientation_of, upright

T = TypeVar("T")
_EPSILON = 1e-6


@dataclass
class SteadyFrame(Generic[T]):
    """Content on screen at one moment.

    Attributes:
        time: Seconds from the first frame of the file, a multiple of the step.
        content: Result of `make` for the frame.
    """

    time: float
    content: T


def steady_frames(
    path: str | Path, rate: float, make: Callable[[Image.Image], T]
) -> Generator[SteadyFrame[T], None, float]:
    """Yield the content on screen at 0, 1 / rate, 2 / rate, ... seconds, decoding the file once from start to end.

    Only selected frames are converted, and none is kept, so that memory use does not grow with the file.

    Args:
        path: Video file.
        rate: Frames per second.
        make: Function from an upright image in mode RGB to the content.

    Returns:
        Seconds from the first frame to the end of the last, as the generator's return value.

    Raises:
        VideoError: The file is not a video, breaks off, is too long, or has frames of an extreme shape.
    """
    path = Path(path)
    convert, number = FrameConverter(), 0
    shown: VideoFrame | None = None
    start, time, gap = 0.0, 0.0, 0.0

    def take(frame: VideoFrame) -> SteadyFrame[T]:
        if max(frame.width, frame.height) > MAX_ELONGATION * min(frame.width, frame.height):
            found = f"its frames have {frame.width:,} x {frame.height:,} pixels"
            raise VideoError(path, f"{found}; one side may be at most {MAX_ELONGATION} times the other")
        return SteadyFrame(number / rate, make(upright(convert(frame), orientation_of(frame))))

    with closing(decoded_frames(path, 1, TimeBudget(path))) as frames:
        for count, frame in enumerate(frames):
            seconds = count / 25 if frame.time is None else frame.time
            if shown is None:
                start = seconds
            elapsed = max(seconds - start, time)
            if elapsed > MAX_SECONDS:
                raise VideoError(path, f"lasts longer than {MAX_SECONDS:,} s according to its timestamps")
            while shown is not None and number / rate < elapsed - _EPSILON:
                yield take(shown)
                number += 1
            gap, time, shown = (elapsed - time) or gap, elapsed, frame
    if shown is None:
        raise VideoError(path, "none of its frames can be decoded")
    end = time + gap
    while number == 0 or number / rate < end - _EPSILON:
        yield take(shown)
        number += 1
    return end
