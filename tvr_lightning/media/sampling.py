"""Frame sampling: select the positions of F frames of a clip from the times of all its frames."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tvr_lightning.errors import UserError
from tvr_lightning.option_types import FrameSampling

Times = NDArray[np.float64]
Positions = NDArray[np.int64]
Span = tuple[float, float]


@dataclass(frozen=True)
class Declared:
    """Frames per second and number of frames that a container declares. Both can be wrong."""

    rate: float
    frames: int


# Much smaller than the duration of a frame and much larger than the rounding error of a timestamp in float64.
_EPSILON = 1e-6


def sample_frames(
    times: Times,
    duration: float,
    frames: int,
    sampling: FrameSampling,
    span: Span | None = None,
    generator: np.random.Generator | None = None,
    declared: Declared | None = None,
) -> Positions:
    """Return ascending positions (K,) of up to F frames of a clip, given the times (n,) of all its frames in seconds.

    The one-per-second rules follow CLIP4Clip (`dataloaders/rawvideo_util.py`), which steps by `int(fps)` frames
    (`int-fps-uniform`, whose spans include the frame at their end); `one-fps-uniform` uses the time and half-open
    spans. The segment rules follow X-Pool (`datasets/video_capture.py`): n frames are split at `np.linspace(0, n, F +
    1)`, and the middle of a segment is `(first + last) // 2`, for variable rates at evenly spaced times. Random
    positions include the last frame of a segment, which X-Pool's `range` excludes. The rules of released code use the
    rate and number of frames that the container has `declared`, by default those of the times.

    Raises:
        UserError: The span is empty, or the generator of a random rule is missing.
    """
    duration = max(duration, 2 * _EPSILON)
    start, end = span or (0.0, duration)
    if not 0 <= start < end:
        raise UserError(f"the span {start} to {end} s is invalid; expected 0 <= start < end")
    end = min(end, duration)
    elapsed = times - times[0]
    if sampling in ("int-fps-uniform", "round-fps-uniform", "round-fps-filled", "container-segments"):
        declared = declared or Declared(len(times) / duration, len(times))
        return np.clip(_released(sampling, len(times), frames, span, declared), 0, len(times) - 1)
    if sampling in ("one-fps-uniform", "head", "tail"):
        return _shorten(_on_screen(elapsed, np.arange(start, end - _EPSILON, 1.0)), frames, sampling)
    if sampling == "segment-random" and generator is None:
        raise UserError("frame sampling 'segment-random' needs a random generator")
    first, last = map(int, _on_screen(elapsed, np.array([start, end - 2 * _EPSILON])))
    count = last - first + 1
    if sampling in ("uniform-floor", "uniform-round", "one-fps-even"):
        return first + _spread(count, end - start, frames, sampling)
    positions = _segments(0, count, frames, generator if sampling == "segment-random" else None)
    finish = elapsed[last + 1] if last + 1 < len(elapsed) else max(duration, elapsed[last])
    instants = elapsed[first] + (positions + 0.5) * (finish - elapsed[first]) / count
    return np.clip(_on_screen(elapsed, instants), first, last)


def _released(sampling: FrameSampling, count: int, frames: int, span: Span | None, declared: Declared) -> Positions:
    """Return the positions that a rule of released code selects in a clip of `count` frames.

    CLIP4Clip (`rawvideo_util.py`) and GARE (`_get_rawvideo_dec`) read spans in whole seconds. TempMe's rule takes F
    frames at equal steps from a clip with fewer than F seconds. T-MASS (`video_capture.py`) computes the segments of a
    span from its end in frames, which need not be an integer.
    """
    if sampling == "container-segments":
        if span is None:
            return _segments(0, declared.frames, frames)
        # Converted to seconds and back, as in the released code, which can round the last edge down by one frame.
        stop = min(span[1], declared.frames / declared.rate) * declared.rate
        return _segments(min(span[0] * declared.rate, count - 1), stop, frames)
    start, end = (0, np.inf) if span is None else (int(span[0]), max(int(span[1]), int(span[0]) + 1))
    if sampling == "int-fps-uniform":
        step = max(int(declared.rate), 1)
        seconds = -(-declared.frames // step)
        positions = np.arange(start, min(end, seconds) + 1, dtype=np.int64) * step
        positions = positions[positions < count]
    else:
        last = int(min(end * declared.rate, count - 1))
        first = int(start * declared.rate)
        positions = np.arange(first, last + 1, max(round(declared.rate), 1), dtype=np.int64)
        if sampling == "round-fps-filled" and 0 < len(positions) < frames:
            positions = np.linspace(first, last, frames).astype(np.int64)
    return _shorten(positions, frames, sampling) if len(positions) else np.array([count - 1])


def _spread(count: int, seconds: float, frames: int, sampling: FrameSampling) -> Positions:
    """Return at most F positions over all `count` frames of a clip, as evaluations of vision-language models do.

    `uniform-floor` is Qwen3-VL-Embedding's evaluation (`save_frames`), `one-fps-even` is qwen-vl-utils' rule for files
    (`smart_nframes`: one frame per second, an even number, at least 4), and `uniform-round` is MTEB's.
    """
    if sampling == "uniform-floor":
        return np.arange(min(frames, count)) * max(count, frames) // frames
    chosen = min(frames, count)
    if sampling == "one-fps-even":
        chosen = max(min(int(max(seconds, 4)), chosen) // 2 * 2, 1)
    # In float32, as in the released code, since the order of rounding decides between two frames.
    return torch.linspace(0, count - 1, chosen).round().long().numpy()


def positions_at_rate(times: Times, duration: float, rate: float) -> Positions:
    """Return the positions (K,) of the frames on screen at 0, 1 / rate, 2 / rate, ... seconds from the first frame."""
    return _on_screen(times - times[0], np.arange(max(np.ceil(duration * rate - _EPSILON), 1)) / rate)


def _on_screen(elapsed: Times, instants: Times) -> Positions:
    """Return the positions (K,) of the frames on screen at the instants (K,), both in seconds from the first frame."""
    positions = np.searchsorted(elapsed, instants + _EPSILON, side="right") - 1
    return np.clip(positions, 0, len(elapsed) - 1).astype(np.int64)


def _shorten(per_second: Positions, frames: int, sampling: FrameSampling) -> Positions:
    """Return at most F of the one-per-second frames, by CLIP4Clip's `slice_framepos`."""
    if sampling == "head":
        return per_second[:frames]
    if sampling == "tail":
        return per_second[-frames:]
    return per_second[np.linspace(0, len(per_second) - 1, min(frames, len(per_second)), dtype=int)]


def _segments(start: float, stop: float, frames: int, generator: np.random.Generator | None = None) -> Positions:
    """Return F positions: the middle or a random one of each equal segment, padded with the last."""
    edges = np.linspace(start, stop, min(frames, max(int(np.ceil(stop - start)), 1)) + 1).astype(np.int64)
    positions = (edges[:-1] + edges[1:] - 1) // 2 if generator is None else generator.integers(edges[:-1], edges[1:])
    return np.pad(positions, (0, frames - len(positions)), mode="edge")
