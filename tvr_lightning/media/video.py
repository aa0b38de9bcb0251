"""Reading of video files: the selected frames of a clip as pixels, and the properties of a file."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tvr_lightning.media.container import VideoError
from tvr_lightning.media.preparation import FrameTransform, Pixels
from tvr_lightning.media.reader import Timeline, open_reader
from tvr_lightning.media.sampling import Positions, Span, Times, positions_at_rate, sample_frames
from tvr_lightning.option_types import FrameSampling

T = TypeVar("T")


@dataclass
class DecodedClip:
    """F frames of one clip, padded with zeros."""

    pixels: Tensor  # RGB (F, 3, H, W), uint8, or float16 if resized without antialiasing
    frame_mask: Tensor  # (F,) bool, True for frames, including a repeated last frame
    timestamps: Tensor  # (F,) float32, seconds from the first frame of the file
    duration: float  # of the file's video, in seconds


@dataclass
class VideoInfo:
    """Properties of a video file, read from its packets and its first frame."""

    duration: float  # seconds from the first frame to the end of the last
    fps: float  # average
    width: int  # of the displayed frames, after rotation
    height: int
    frames: int
    timed: bool  # False if all frames have the same timestamp; they are then read in order, at the declared rate
    has_audio: bool
    broken: str | None  # reason why the stream ends before the end that its container declares


def read_clip(
    path: str | Path,
    frames: int,
    prepare: FrameTransform,
    sampling: FrameSampling = "one-fps-uniform",
    span: Span | None = None,
    generator: np.random.Generator | None = None,
) -> DecodedClip:
    """Decode F frames of a file, or of a span of it in seconds from the first frame."""
    return read_parts(path, lambda duration: [span], frames, prepare, sampling, generator)[0]


def read_parts(
    path: str | Path,
    divide: Callable[[float], Sequence[Span | None]],
    frames: int,
    prepare: FrameTransform,
    sampling: FrameSampling = "segment-centers",
    generator: np.random.Generator | None = None,
) -> list[DecodedClip]:
    """Decode F frames of each span (None: the whole file) that `divide` returns for the duration of a file.

    Only the segments that lead to a selected frame are decoded, and only selected frames are converted: `prepare` makes
    them equal in size. The rotation stored in the file is applied; pixels are treated as square, as in OpenCV, which
    the published results use. A file that is not a video or ends before a selected frame raises VideoError: frames are
    never replaced.
    """
    # A single draw, so that choosing again selects the same random frames.
    seed = None if generator is None else int(generator.integers(2**63))
    chosen: list[Positions] = []
    with open_reader(path) as video:

        def choose(timeline: Timeline) -> list[int]:
            chosen.clear()
            for span in divide(timeline.duration):
                if video.broken and (span is None or span[1] > video.end):
                    raise VideoError(video.budget.path, video.broken)
                if span is not None and span[0] >= timeline.duration and span[0] > 0:
                    end = f"its last frame, at {timeline.duration:.3f} s"
                    raise VideoError(video.budget.path, f"the span {span} begins after {end}")
                draw = None if seed is None else np.random.default_rng(seed)
                clip = (timeline.times, timeline.duration, frames, sampling, span)
                chosen.append(sample_frames(*clip, draw, video.declared))
            return [int(position) for position in np.concatenate(chosen)]

        images = dict(video.frames(choose, prepare))
    if len({image.shape for image in images.values()}) > 1:
        raise VideoError(video.budget.path, "its frames have different sizes")
    clips = []
    for positions in chosen:
        selected = [images[position] for position in positions.tolist()]
        clips.append(padded_clip(selected, video.timeline.times[positions], frames, video.timeline.duration))
    return clips


def padded_clip(images: list[Pixels], times: Times, frames: int, duration: float) -> DecodedClip:
    """Return a clip of up to F images (H, W, 3) and their times in seconds, padded with zeros to F frames."""
    shown = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    pixels, timestamps = shown.new_zeros(frames, *shown.shape[1:]), torch.zeros(frames)
    pixels[: len(shown)], timestamps[: len(shown)] = shown, torch.from_numpy(times)
    return DecodedClip(pixels, torch.arange(frames) < len(shown), timestamps, duration)


def frames_at_rate(
    path: str | Path, rate: float, make: Callable[[Image.Image], T]
) -> Generator[tuple[float, T], None, float]:
    """Yield time and content on screen at 0, 1 / rate, 2 / rate, ... seconds, and return the duration of the video.

    Times are in seconds from the first frame. Frames are converted one by one with `make`, so that memory use does not
    grow with their number. If the file has fewer than `rate` frames per second, they are repeated.
    """
    positions: list[int] = []
    number = 0

    def choose(timeline: Timeline) -> list[int]:
        positions[:] = positions_at_rate(timeline.times, timeline.duration, rate).tolist()
        return positions

    with open_reader(path) as video:
        if video.broken:
            raise VideoError(video.budget.path, video.broken)
        for position, content in video.frames(choose, make):
            while number < len(positions) and positions[number] == position:
                yield number / rate, content
                number += 1
    return video.timeline.duration


def probe(path: str | Path) -> VideoInfo:
    """Read the properties of a video file, decoding only its first frame; of a broken one, those before the break."""
    with open_reader(path) as video:
        width, height = video.first_frame().size
        timeline = video.timeline
        return VideoInfo(
            duration=timeline.duration,
            fps=len(timeline.times) / timeline.duration if timeline.duration else 0.0,
            width=width,
            height=height,
            frames=len(timeline.times),
            timed=len(video.pts) < 2 or bool((video.pts != video.pts[0]).any()),
            has_audio=bool(video.container.streams.audio),
            broken=video.broken,
        )
