"""Which frames of a clip are looked at: from the times of its frames to the positions of F of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

FrameSampling = Literal[
    "one-fps-uniform",
    "segment-centres",
    "segment-random",
    "head",
    "tail",
    "int-fps-uniform",
    "round-fps-uniform",
    "container-segments",
]
"""Rules by which F frames are taken from a clip.

- `one-fps-uniform`: CLIP4Clip's default (`slice_framepos 2`) by time: the frame on screen at each whole second, and of
  these F at equal steps, `np.linspace(0, n - 1, F, dtype=int)`, if there are more than F.
- `head`, `tail`: CLIP4Clip's `slice_framepos 0` and `1`: the first or the last F of those one-per-second frames.
- `segment-centres`: F equal segments of the clip's frames, the middle frame of each.
- `segment-random`: X-Pool's `sample='rand'`: F equal segments, a random frame of each.

The released codes count frames instead of seconds. These rules take exactly their frames, on original files too:

- `int-fps-uniform`: CLIP4Clip, X-CLIP, UCoFiA: every `int(rate)`-th frame, and of these F at equal steps. The end of a
  span is included.
- `round-fps-uniform`: GARE, DRL: every `round(rate)`-th frame, and of these F at equal steps.
- `container-segments`: X-Pool, T-MASS, GAID: F equal segments of the number of frames that the container states, the
  middle frame of each.
"""

Times = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Declared:
    """Frame rate and number of frames that a container states; both can be wrong.

    Attributes:
        rate: Average frames per second.
        frames: Number of frames.
    """

    rate: float
    frames: int


# Far below any frame's length and far above the rounding of a time stamp held in float64.
_EPSILON = 1e-6


def pads_short_clips(sampling: FrameSampling) -> bool:
    """Return whether a clip with too few frames is padded and masked (CLIP4Clip) or repeats its last one (X-Pool)."""
    return sampling in ("one-fps-uniform", "head", "tail", "int-fps-uniform", "round-fps-uniform")


def sample_frames(
    times: Times,
    duration: float,
    frames: int,
    sampling: FrameSampling,
    span: tuple[float, float] | None = None,
    generator: np.random.Generator | None = None,
    declared: Declared | None = None,
) -> Positions:
    """Choose up to F frames of a clip by the time stamps of all its frames.

    The one-per-second strategies follow CLIP4Clip (`dataloaders/rawvideo_util.py` and the slicing in its dataset
    classes). That code steps by `int(fps)` frames, so a second of a 29.97 fps clip is 29 frames (`int-fps-uniform`);
    `one-fps-uniform` goes by time, which agrees wherever the rate is a whole number and holds for variable rates. Its
    spans are half open, as the whole clip is; those of `int-fps-uniform` include the frame at their end.

    The segment strategies follow X-Pool (`datasets/video_capture.py`, which T-MASS and GAID kept): n frames are cut at
    `np.linspace(0, n, F + 1).astype(int)`, and the middle of each segment is `(first + last) // 2`; with fewer than F
    frames each is taken once and the last repeated. The rule is applied to a constant-rate clip of as many frames, and
    each position is then the frame on screen at that instant: the same frame where the rate is constant, equal times
    where it is not. Random positions include the last frame of a segment, which X-Pool's `range` leaves out.

    Args:
        times: (n,) seconds of the frames, rising; the first need not be 0.
        duration: seconds from the first frame to the end of the last.
        frames: F, how many frames are wanted.
        sampling: the strategy.
        span: start and end in seconds from the first frame; an end past the clip's is cut to it.
        generator: where `segment-random` draws from; the same state gives the same frames.
        declared: What the container states, which the released rules need.

    Returns:
        (K,) rising positions in `times`: K = F for the segment strategies, at most F for the others.

    Raises:
        ValueError: an unknown strategy, no frames, a span that is empty or begins after the clip, random positions
            without a generator, or a released rule without what the container states.
    """
    if sampling not in get_args(FrameSampling):
        raise ValueError(f"frame sampling {sampling!r} is unknown; choose one of {', '.join(get_args(FrameSampling))}")
    if frames < 1:
        raise ValueError(f"frames is {frames}; it must be at least 1")
    if len(times) == 0:
        raise ValueError("the clip has no frames")
    start, end = _check_span(span, duration)
    if sampling in ("int-fps-uniform", "round-fps-uniform", "container-segments"):
        if declared is None:
            raise ValueError(f"frame sampling {sampling!r} counts frames and needs the frame count of the container")
        return np.clip(_released(sampling, len(times), frames, span, declared), 0, len(times) - 1)
    elapsed = times - times[0]
    if pads_short_clips(sampling):
        per_second = _on_screen(elapsed, np.arange(start, end - _EPSILON, 1.0))
        return _shorten(per_second, frames, sampling)
    first = int(_on_screen(elapsed, np.array([start]))[0])
    last = int(_on_screen(elapsed, np.array([end - 2 * _EPSILON]))[0])
    if sampling == "segment-random" and generator is None:
        raise ValueError("frame sampling 'segment-random' needs a random generator")
    count = last - first + 1
    positions = _segments(0, count, frames, generator if sampling == "segment-random" else None)
    finish = elapsed[last + 1] if last + 1 < len(elapsed) else max(duration, elapsed[last])
    instants = elapsed[first] + (positions + 0.5) * (finish - elapsed[first]) / count
    return np.clip(_on_screen(elapsed, instants), first, last)


def _released(
    sampling: FrameSampling, count: int, frames: int, span: tuple[float, float] | None, declared: Declared
) -> Positions:
    """Return the positions that a released rule asks for in a clip of `count` frames.

    CLIP4Clip (`rawvideo_util.py`) and GARE (`_get_rawvideo_dec`) read spans in whole seconds. T-MASS
    (`video_capture.py`) cuts a span's segments from its end in frames, which is no whole number.
    """
    if sampling == "container-segments":
        if span is None:
            return _segments(0, declared.frames, frames)
        # In seconds and back, as released: the last edge can be rounded down by one frame.
        stop = min(span[1], declared.frames / declared.rate) * declared.rate
        return _segments(min(span[0] * declared.rate, count - 1), stop, frames)
    start, end = (0, None) if span is None else (int(span[0]), max(int(span[1]), int(span[0]) + 1))
    if sampling == "int-fps-uniform":
        step = max(int(declared.rate), 1)
        seconds = -(-declared.frames // step)
        positions = np.arange(start, (seconds if end is None else min(end, seconds)) + 1, dtype=np.int64) * step
        positions = positions[positions < count]
    else:
        last = count - 1 if end is None else int(min(end * declared.rate, count - 1))
        positions = np.arange(int(start * declared.rate), last + 1, max(round(declared.rate), 1), dtype=np.int64)
    return _shorten(positions, frames, sampling) if len(positions) else np.array([count - 1])


def steady_frames(times: Times, duration: float, rate: int, span: tuple[float, float] | None = None) -> Positions:
    """Choose the frames on screen at 0, 1 / rate, 2 / rate ... seconds from the first frame, as far as the clip goes.

    Args:
        times: (n,) seconds of the frames, rising; the first need not be 0.
        duration: seconds from the first frame to the end of the last.
        rate: moments a second.
        span: start and end in seconds from the first frame: only the moments in it, the end left out.

    Returns:
        (K,) positions in `times`, rising; a frame that is on screen at several moments comes several times.

    Raises:
        ValueError: there are no frames, or the span is empty or begins after the clip.
    """
    if len(times) == 0:
        raise ValueError("the clip has no frames")
    start, end = _check_span(span, duration)
    moments = np.arange(np.ceil(start * rate - _EPSILON), max(np.ceil(end * rate - _EPSILON), 1)) / rate
    return _on_screen(times - times[0], moments)


def _check_span(span: tuple[float, float] | None, duration: float) -> tuple[float, float]:
    """Return the span cut to the clip, which is never shorter than an instant."""
    duration = max(duration, 2 * _EPSILON)
    if span is None:
        return 0.0, duration
    start, end = span
    if not 0 <= start < end:
        raise ValueError(f"the span {start} to {end} s is invalid; expected 0 <= start < end")
    if start >= duration:
        raise ValueError(f"the span {start} to {end} s begins after the clip, which lasts {duration:.3f} s")
    return float(start), float(min(end, duration))


def _on_screen(elapsed: Times, instants: Times) -> Positions:
    """Return the positions (K,) of the frames on screen at the instants (K,), both in seconds from the first frame."""
    positions = np.searchsorted(elapsed, instants + _EPSILON, side="right") - 1
    return np.clip(positions, 0, len(elapsed) - 1).astype(np.int64)


def _shorten(per_second: Positions, frames: int, sampling: FrameSampling) -> Positions:
    """Return at most F of the one-per-second frames, by CLIP4Clip's `slice_framepos`."""
    if len(per_second) <= frames:
        return per_second
    if sampling == "head":
        return per_second[:frames]
    if sampling == "tail":
        return per_second[-frames:]
    return per_second[np.linspace(0, len(per_second) - 1, frames, dtype=int)]


def _segments(start: float, stop: float, frames: int, generator: np.random.Generator | None = None) -> Positions:
    """Return F positions between two others: one per equal segment, its middle or a random one; the last repeated."""
    edges = np.linspace(start, stop, min(frames, max(int(np.ceil(stop - start)), 1)) + 1).astype(np.int64)
    positions = (edges[:-1] + edges[1:] - 1) // 2 if generator is None else generator.integers(edges[:-1], edges[1:])
    missing = frames - len(positions)
    return np.concatenate([positions, np.repeat(positions[-1:], missing)]).astype(np.int64)
