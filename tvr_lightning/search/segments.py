"""Videos read in segments (shots or windows), with thumbnails, and memory for one segment at a time."""

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tvr_lightning.data.audio_alignment import clip_media
from tvr_lightning.media.preparation import Pixels, Preparation
from tvr_lightning.media.sampling import Declared, sample_frames
from tvr_lightning.media.video import frames_at_rate, padded_clip, probe
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.results import SegmentKind
from tvr_lightning.search.scorer import Clip, Scorer

LENGTH = 20.0  # default duration of a segment in seconds
RATE = 2.0  # frames per second of a video that is cut
SHORTEST_SHOT = 2.0  # seconds
CHANGE = 27.0
"""Mean difference of hue, saturation, and brightness (0 to 255) at a shot boundary; the default of PySceneDetect's
content detector (https://www.scenedetect.com/docs/latest/api/detectors.html)."""
LONGEST_SIDE = 320  # of a thumbnail in pixels
_COMPARED = 32  # side in pixels of the images whose differences are measured
_EPSILON = 1e-6


@dataclass(frozen=True)
class Segments:
    """Rule for cutting videos longer than `length` seconds.

    "shots" cuts at shot boundaries and after `length` at the latest, "windows" every `length`, and "none" not. A
    window, or a part of a longer shot, shares `overlap` seconds with the previous one.
    """

    kind: SegmentKind = "shots"
    length: float = LENGTH
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if not SHORTEST_SHOT <= self.length <= 3600:
            raise SearchError(f"segment_length is {self.length:g} s; it must be between {SHORTEST_SHOT:g} and 3600")
        if not 0 <= self.overlap <= self.length - 1:
            raise SearchError(f"segment_overlap is {self.overlap:g} s; it must be between 0 and {self.length - 1:g}")
        if self.kind == "none" and (self.length, self.overlap) != (LENGTH, 0.0):
            raise SearchError("segments: none does not cut videos. Drop segment_length and segment_overlap.")

    def cuts(self, path: Path) -> bool:
        """Return whether a video has more than one segment."""
        return self.kind != "none" and probe(path).duration > self.length


def hue_saturation_brightness(image: Image.Image) -> NDArray[np.int16]:
    """Return a copy (32, 32, 3) of an RGB image in which changes are measured."""
    return np.asarray(image.resize((_COMPARED, _COMPARED), Image.Resampling.BOX).convert("HSV"), dtype=np.int16)


def change(one: NDArray[np.int16], other: NDArray[np.int16]) -> float:
    """Return the mean difference, 0 to 255, of two images (H, W, 3) in HSV; hues are on a circle."""
    difference = np.abs(one - other)
    difference[..., 0] = np.minimum(difference[..., 0], 256 - difference[..., 0])
    return float(difference.mean())


@dataclass
class Frame:
    """One frame of a video that is cut: inputs (H, W, 3) by preparation, a small JPEG, and the size in pixels."""

    compared: NDArray[np.int16]
    inputs: dict[Preparation, Pixels]
    jpeg: bytes
    size: tuple[int, int]


Segment = tuple[float, float, dict[float, Frame]]
"""Start and end of a segment, and its frames by time, all in seconds from the video's first frame."""


def cut(frames: Iterable[tuple[float, Frame]], rule: Segments) -> Iterator[Segment]:
    """Cut a video into segments while its frames and their times are read."""
    kept: dict[float, Frame] = {}
    start, shot, time, previous = 0.0, 0.0, 0.0, None
    for time, frame in frames:
        is_cut = (
            rule.kind == "shots"
            and previous is not None
            and time - shot >= SHORTEST_SHOT - _EPSILON
            and change(frame.compared, previous.compared) >= CHANGE
        )
        if is_cut or time >= start + rule.length - _EPSILON:
            yield start, time, kept
            start = time if is_cut else start + rule.length - rule.overlap
            shot = time if is_cut else shot
            kept = {} if is_cut else {earlier: kept[earlier] for earlier in kept if earlier >= start - _EPSILON}
        kept[time] = previous = frame
    if kept:
        yield start, time + 1 / RATE, kept


def thumbnail(image: Image.Image) -> bytes:
    """Return a small JPEG of an RGB image with the same aspect ratio."""
    small = image.copy()
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


@dataclass
class SegmentClips:
    """One segment as read: seconds from the video's first frame, clips by scorer, JPEGs by time, and frame size."""

    start: float
    end: float
    clips: dict[str, Clip]
    thumbnails: dict[float, bytes]
    size: tuple[int, int]


def _read_clips(models: dict[str, Scorer], read: Callable[[Scorer], Clip]) -> dict[str, Clip]:
    """Return the clip of each scorer; scorers with equal options of reading share it."""
    clips: dict[tuple[object, ...], Clip] = {}
    for model in models.values():
        if model.reading not in clips:
            clips[model.reading] = read(model)
    return {name: clips[model.reading] for name, model in models.items()}


def read_whole(path: Path, models: dict[str, Scorer]) -> SegmentClips:
    """Read a video as one segment."""
    name, first = next(iter(models.items()))
    jpegs: dict[bytes, bytes] = {}
    size = (0, 0)

    def prepare(image: Image.Image) -> Pixels:
        nonlocal size
        pixels = first.preparation(image)
        size, jpegs[pixels.tobytes()] = image.size, thumbnail(image)
        return pixels

    clips = _read_clips(models, lambda model: model.read(path, prepare if model is first else None))
    media, times = clips[name].media, clips[name].times
    mask = media.frame_mask[0]
    frames: Any = media.pixels[0]
    pixels = frames[: int(mask.sum())].permute(0, 2, 3, 1).numpy()
    thumbnails = {time: jpegs[frame.tobytes()] for time, frame in zip(times[mask].tolist(), pixels, strict=True)}
    return SegmentClips(0.0, clips[name].duration, clips, thumbnails, size)


def read_segments(path: Path, models: dict[str, Scorer], rule: Segments) -> Iterator[SegmentClips]:
    """Read a video segment by segment, in the order of time."""
    preparations = {model.preparation for model in models.values()}

    def frame(image: Image.Image) -> Frame:
        inputs = {prepare: prepare(image) for prepare in preparations}
        return Frame(hue_saturation_brightness(image), inputs, thumbnail(image), image.size)

    for start, end, frames in cut(frames_at_rate(path, RATE, frame), rule):
        clips = _read_clips(models, partial(_clip, path, (start, end, frames)))
        used = {time for clip in clips.values() for time in clip.times.tolist()}
        thumbnails = {time: frames[time].jpeg for time in frames if time in used}
        yield SegmentClips(start, end, clips, thumbnails, next(iter(frames.values())).size)


def _clip(path: Path, segment: Segment, model: Scorer) -> Clip:
    start, end, available = segment
    length, frames, seen, times = end - start, model.module.frames, list(available.values()), np.array(list(available))
    chosen = sample_frames(times - start, length, frames, model.sampling, declared=Declared(RATE, len(times)))
    shown = [seen[place].inputs[model.preparation] for place in chosen.tolist()]
    clip = padded_clip(shown, times[chosen], frames, end)
    media = clip_media(clip, path, (start, end), model.audio, is_square=model.preparation.is_square)
    return Clip(media, clip.timestamps, length)
