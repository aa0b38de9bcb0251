"""Long videos cut into segments that are found by themselves: shots, or windows of a fixed length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tvr_lightning.media.preparation import Pixels
from tvr_lightning.media.steady import SteadyFrame
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.results import SegmentKind

LENGTH = 20.0
"""Seconds of a segment, unless said otherwise."""
RATE = 2.0
"""Pictures per second that are looked at in a video that is cut."""
SHORTEST_SHOT = 2.0
"""Seconds; quicker cuts stay together."""
CHANGE = 27.0
"""By how much hue, saturation and brightness (0 to 255) differ on average where a shot ends; PySceneDetect's own
threshold of its detector of content (https://www.scenedetect.com/docs/latest/api/detectors.html)."""
_LOOK = 32  # pixels to a side of what is compared
_EPSILON = 1e-6


@dataclass(frozen=True)
class Segments:
    """How videos are cut.

    Attributes:
        kind: "shots" cut where the picture changes, and after `length` seconds at the latest; "windows" every `length`
            seconds; "none" leaves every video whole.
        length: seconds; videos that are no longer stay whole.
        overlap: seconds that a window, or a part of a longer shot, shares with the one before.

    Raises:
        SearchError: an unknown kind, or lengths that do not fit each other.
    """

    kind: SegmentKind = "shots"
    length: float = LENGTH
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(SegmentKind):
            raise SearchError(f"segments: {self.kind!r}; expected {', '.join(get_args(SegmentKind))}")
        if not SHORTEST_SHOT <= self.length <= 3600:
            raise SearchError(f"segment_length is {self.length:g} s; it must be between {SHORTEST_SHOT:g} and 3600")
        if not 0 <= self.overlap <= self.length - 1:
            raise SearchError(f"segment_overlap is {self.overlap:g} s; it must be between 0 and {self.length - 1:g}")
        if self.kind == "none" and (self.length, self.overlap) != (LENGTH, 0.0):
            raise SearchError("segments: none does not cut videos. Drop segment_length and segment_overlap.")


class ChangeFrame:
    """A picture as changes are measured in it.

    Args:
        picture: of mode RGB and any size.
    """

    def __init__(self, picture: Image.Image) -> None:
        small = picture.resize((_LOOK, _LOOK), Image.Resampling.BOX).convert("HSV")
        self.values: NDArray[np.int16] = np.asarray(small, dtype=np.int16)

    def change(self, other: ChangeFrame) -> float:
        """Return the mean difference of hue, saturation and brightness, 0 to 255; hues lie on a circle."""
        difference = np.abs(self.values - other.values)
        difference[..., 0] = np.minimum(difference[..., 0], 256 - difference[..., 0])
        return float(difference.mean())


@dataclass
class Frame:
    """One picture of a video that is cut.

    Attributes:
        looked: what changes are measured in.
        squares: (S, S, 3) as encoders take it, by the way of its preparation.
        jpeg: what is shown of it; None for pictures that are not kept.
    """

    looked: ChangeFrame
    squares: list[Pixels]
    jpeg: bytes | None


F = TypeVar("F", bound=Frame)


@dataclass
class Segment(Generic[F]):
    """A segment of a video.

    Attributes:
        start, end: seconds from the video's first frame.
        frames: in the order of time, the ones in the overlap with the segment before it included.
        new: of the frames, how many the segment before it did not have.
    """

    start: float
    end: float
    frames: list[SteadyFrame[F]]
    new: int


def cut(frames: Iterable[SteadyFrame[F]], how: Segments) -> Iterator[Segment[F]]:
    """Cut a video while it is read; no more than one segment of it is in memory.

    Args:
        frames: at a steady rate, in the order of time.
        how: the kind, length and overlap.
    """
    held: list[SteadyFrame[F]] = []
    start, shot, new = 0.0, 0.0, 0
    for frame in frames:
        is_cut = (
            how.kind == "shots"
            and held
            and frame.time - shot >= SHORTEST_SHOT - _EPSILON
            and frame.content.looked.change(held[-1].content.looked) >= CHANGE
        )
        if is_cut or frame.time >= start + how.length - _EPSILON:
            yield Segment(start, frame.time, held, new)
            start = frame.time if is_cut else start + how.length - how.overlap
            shot = frame.time if is_cut else shot
            held = [] if is_cut else [each for each in held if each.time >= start - _EPSILON]
            new = 0
        held.append(frame)
        new += 1
    if new:
        yield Segment(start, held[-1].time + 1 / RATE, held, new)
