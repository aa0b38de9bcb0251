"""Reading of video files: the selected frames of a clip as pixels, and the properties of a file."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray
from torch import Tensor

from tvr_lightning.media.augment import FrameTransform
from tvr_lightning.media.container import MAX_ELONGATION, MAX_SECONDS, TimeBudget, VideoError
from tvr_lightning.media.decoder import FrameConverter, decoded_frames, frames_in_order, frames_of_runs, open_video
from tvr_lightning.media.orientation import orientation_of, upright
from tvr_lightning.media.packets import PacketIndex, index_packets, plan_runs
from tvr_lightning.media.preparation import Pixels, Preparation
from tvr_lightning.media.sampling import Declared, Positions, sample_frames, steady_frames
from tvr_lightning.media.timeline import Timeline, cut_short, even_timeline, packet_timeline, timeline_of
from tvr_lightning.ranges import FrameSampling

__all__ = ["DecodedClip", "VideoError", "VideoInfo", "probe", "read_clip", "read_parts", "read_steadily"]

Span = tuple[float, float]

STRETCH_SECONDS = 240
"""Duration of the segments that `read_steadily` decodes, one in memory at a time."""


@dataclass
class DecodedClip:
    """F frames of one clip.

    Attributes:
        pixels: RGB pixels (F, 3, S, S), uint8, or float16 if resized without antialiasing. Padded frames are zero.
        frame_mask: Mask (F,), bool, True for frames. A repeated last frame counts as a frame.
        timestamps: Time of each frame in seconds from the first frame of the file, (F,) float32; 0 for padding.
        duration: Duration of the file's video in seconds.
    """

    pixels: Tensor
    frame_mask: Tensor
    timestamps: Tensor
    duration: float


@dataclass
class VideoInfo:
    """Properties of a video file, read from its packets and its first frame.

    Attributes:
        duration: Seconds from the first frame to the end of the last.
        fps: Average number of frames per second.
        width, height: Size of the displayed frames in pixels, after rotation.
        frames: Number of frames.
        timed: False if all frames have the same timestamp. They are then read in order, at the declared rate.
        has_audio: True if there is an audio track.
        broken: Reason why the stream ends before the end that its container declares, or None.
    """

    duration: float
    fps: float
    width: int
    height: int
    frames: int
    timed: bool
    has_audio: bool
    broken: str | None


def read_clip(
    path: str | Path,
    *,
    frames: int,
    image_size: int,
    sampling: FrameSampling = "one-fps-uniform",
    span: Span | None = None,
    generator: np.random.Generator | None = None,
    augment: FrameTransform | None = None,
    threads: int = 1,
) -> DecodedClip:
    """Decode F frames of a clip.

    Only the segments that lead to a selected frame are decoded, and only selected frames are converted to RGB. The
    rotation stored in the file is applied; pixels are treated as square, as in OpenCV, which the published results use.

    Args:
        path: Video file in any container and codec that FFmpeg can read.
        frames: Number of frames F.
        image_size: Image size S in pixels.
        sampling: Rule that selects the frames (`FrameSampling`).
        span: Start and end in seconds from the first frame. None means the whole file.
        generator: Random generator for `segment-random`.
        augment: Transform from an RGB frame to (S, S, 3), the same for all frames: a `Preparation` or a result of
            `draw_augmentation`. None means CLIP's preparation.
        threads: Number of decoding threads. With many worker processes, 1 is best.

    Returns:
        The frames with their mask and times.

    Raises:
        VideoError: The file is missing, is not a video, has no frames in the span, or ends before a selected frame. A
            frame is never replaced by another.
        UserError: Options contradict each other (see `sample_frames`).
    """
    # A single draw, so that decoding the same clip a second time selects the same random frames.
    seed = None if generator is None else int(generator.integers(2**63))
    request = ClipRequest(Path(path), frames, image_size, sampling, seed, augment, threads)
    return _read(request, lambda duration: [span])[1][0]


def read_parts(
    path: str | Path,
    divide: Callable[[float], list[Span]],
    *,
    frames: int,
    image_size: int,
    sampling: FrameSampling = "segment-centres",
) -> tuple[list[Span], list[DecodedClip]]:
    """Decode F frames of each of several parts of a file, which is opened and indexed once.

    Args:
        path: Video file, as for `read_clip`.
        divide: Function from the duration of the file's video in seconds to the start and end of each part.
        frames: Number of frames F per part.
        image_size: Image size S in pixels.
        sampling: Rule that selects the frames of a part.

    Returns:
        The parts, and the clip of each part as in `read_clip`.

    Raises:
        VideoError: A part cannot be read (see `read_clip`).
        UserError: Options contradict each other (see `sample_frames`).
    """
    parts, clips = _read(ClipRequest(Path(path), frames, image_size, sampling), divide)
    return [part for part in parts if part is not None], clips


def read_steadily(path: str | Path, rate: int, transform: FrameTransform) -> Iterator[tuple[float, list[Pixels]]]:
    """Decode the frames on screen at 0, 1 / rate, 2 / rate, ... seconds, in segments of a few minutes.

    Args:
        path: Video file, as for `read_clip`.
        rate: Frames per second. If the file has fewer, frames are repeated.
        transform: Transform from an RGB frame to pixels of any size.

    Yields:
        The duration of the file's video in seconds, and the next frames (h, w, 3).

    Raises:
        VideoError: The file cannot be read (see `read_clip`).
    """
    start, duration = 0, float("inf")
    while start < duration:

        def stretch(lasts: float, start: int = start) -> list[Span | None]:
            return [(start, min(float(start + STRETCH_SECONDS), lasts))] if lasts > 0 else [None]

        request = ClipRequest(Path(path), 1, 0, "one-fps-uniform", augment=transform, rate=rate)
        timeline, _, (positions,), images = _find(request, stretch)
        duration = timeline.duration
        yield duration, [images[position] for position in positions.tolist()]
        start += STRETCH_SECONDS


@dataclass
class ClipRequest:
    """Request for frames of a file, with the options of `read_clip`. `seed` is the seed for its random generator.

    With a `rate`, all frames at that rate are selected instead of `frames` by `sampling`.
    """

    path: Path
    frames: int
    image_size: int
    sampling: FrameSampling
    seed: int | None = None
    augment: FrameTransform | None = None
    threads: int = 1
    rate: int | None = None

    def __post_init__(self) -> None:
        self.budget = TimeBudget(self.path, self.threads)
        self._converter = FrameConverter()

    def choose(self, span: Span | None, timeline: Timeline, declared: Declared) -> Positions:
        """Return the positions of the selected frames. A span after the end of the clip is an error of the file."""
        _check_length(self.path, timeline.duration)
        if span is not None and span[0] >= timeline.duration > 0:
            end = f"its last frame, at {timeline.duration:.3f} s"
            raise VideoError(self.path, f"the span {span} begins after {end}")
        if self.rate is not None:
            return steady_frames(timeline.times, timeline.duration, self.rate, span)
        generator = None if self.seed is None else np.random.default_rng(self.seed)
        return sample_frames(timeline.times, timeline.duration, self.frames, self.sampling, span, generator, declared)

    def convert(self, frame: VideoFrame) -> Pixels:
        """Return a frame upright and transformed, (S, S, 3)."""
        if max(frame.width, frame.height) > MAX_ELONGATION * min(frame.width, frame.height):
            found = f"its frames have {frame.width:,} x {frame.height:,} pixels"
            raise VideoError(self.path, f"{found}; one side may be at most {MAX_ELONGATION} times the other")
        image = upright(self._converter(frame), orientation_of(frame))
        transform = self.augment or Preparation(self.image_size)
        return transform(image)


def _read(
    request: ClipRequest, divide: Callable[[float], Sequence[Span | None]]
) -> tuple[Sequence[Span | None], list[DecodedClip]]:
    """Return the clip of every span that `divide` returns for the file's duration. None means the whole file."""
    timeline, spans, chosen, images = _find(request, divide)
    return spans, [_assemble(request, timeline, positions, images) for positions in chosen]


def _find(
    request: ClipRequest, divide: Callable[[float], Sequence[Span | None]]
) -> tuple[Timeline, Sequence[Span | None], list[Positions], dict[int, Pixels]]:
    """Decode the selected frames of every span. Return the timeline, the spans, their positions, and the frames."""
    with open_video(request.path, request.threads) as (container, stream):
        index = _index(container, stream, request.budget)
        declared = Declared(float(index.rate), index.stated)
        timeline = packet_timeline(index)
        spans = divide(timeline.duration)
        _check_reach(container, stream, index, spans, request.budget)
        chosen = [request.choose(span, timeline, declared) for span in spans]
        images = _decode_planned(request, stream, index, timeline, _all(chosen))
        looks = _looks(request, stream, index, fresh=timeline.stamps is None)
        if images is None and index.timed and not index.ordered and not index.packed:
            images = _decode_straight(request, next(looks), _all(chosen))
        if images is None:
            # The frames at the positions from the packet times are usually right, which saves decoding the file again.
            timeline, images = _decode_through(request, next(looks), index, _all(chosen))
            spans = divide(timeline.duration)
            chosen = [request.choose(span, timeline, declared) for span in spans]
        if not _all(chosen) <= images.keys():
            images = _decode_straight(request, next(looks), _all(chosen))
    if images is None:
        raise VideoError(request.path, "does not decode to the same frames twice")
    return timeline, spans, chosen, images


def _looks(
    request: ClipRequest, stream: VideoStream, index: PacketIndex, fresh: bool
) -> Iterator[Generator[VideoFrame, None, None]]:
    """Yield repeated decodings of the whole file, the first one from packets in memory if the decoder is `fresh`."""
    if fresh and index.packets is not None and index.broken is None:
        yield frames_in_order(stream, [*index.packets, None], request.budget)
    while True:
        yield decoded_frames(request.path, request.threads, request.budget)


def _all(chosen: Sequence[Positions]) -> set[int]:
    return {position for positions in chosen for position in positions.tolist()}


def probe(path: str | Path) -> VideoInfo:
    """Read the properties of a video file, decoding only its first frame.

    Args:
        path: Video file.

    Returns:
        The properties. If the stream breaks off, they describe the part before, and `broken` contains the reason.

    Raises:
        VideoError: The file is missing or contains no video that can be decoded.
    """
    path = Path(path)
    budget = TimeBudget(path)
    with open_video(path, threads=1) as (container, stream):
        index = _index(container, stream, budget)
        timeline = packet_timeline(index)
        first = _first_frame(stream, index, timeline, budget)
        turned = orientation_of(first).quarter_turns % 2 == 1
        count = len(timeline.times)
        return VideoInfo(
            duration=timeline.duration,
            fps=count / timeline.duration if timeline.duration else 0.0,
            width=first.height if turned else first.width,
            height=first.width if turned else first.height,
            frames=count,
            timed=not index.stopped,
            has_audio=bool(container.streams.audio),
            broken=cut_short(container, stream, index, budget),
        )


def _index(container: InputContainer, stream: VideoStream, budget: TimeBudget) -> PacketIndex:
    index = index_packets(container, stream, budget)
    if not index.shown.any():
        reason = f"its video stream has no frames{f' ({index.broken})' if index.broken else ''}"
        raise VideoError(budget.path, reason)
    if index.timed:
        _check_stamps(index, index.presented(), budget.path)
    return index


def _check_stamps(index: PacketIndex, stamps: NDArray[np.int64], path: Path) -> None:
    # In Python integers, since the difference of two timestamps may not fit into 64 bits.
    _check_length(path, float((int(stamps[-1]) - int(stamps[0])) * index.time_base))


def _check_length(path: Path, seconds: float) -> None:
    if seconds > MAX_SECONDS:
        raise VideoError(path, f"lasts {seconds:,.0f} s according to its timestamps; the maximum is {MAX_SECONDS:,} s")


def _check_reach(
    container: InputContainer,
    stream: VideoStream,
    index: PacketIndex,
    spans: Sequence[Span | None],
    budget: TimeBudget,
) -> None:
    """Raise VideoError if a requested span extends past the end of a stream that breaks off."""
    reason = cut_short(container, stream, index, budget)
    end = packet_timeline(index).duration
    if reason and any(span is None or span[1] > end for span in spans):
        raise VideoError(budget.path, reason)


def _decode_planned(
    request: ClipRequest, stream: VideoStream, index: PacketIndex, timeline: Timeline, positions: set[int]
) -> dict[int, Pixels] | None:
    """Decode the segments that lead to the selected positions.

    Returns:
        The frames by position. None if one is missing and the file must be decoded from the start to find the reason (a
        damaged stream, or one whose packets are not complete frames).
    """
    if timeline.stamps is None:
        return None
    wanted = {int(timeline.stamps[position]): position for position in positions}
    images: dict[int, Pixels] = {}
    try:
        latest: tuple[int, int] | None = None
        with closing(frames_of_runs(stream, index, plan_runs(index, wanted), request.budget)) as frames:
            for run, frame in frames:
                # MPEG-4 with two frames in a packet: the frames are in the right order, but their timestamps are wrong.
                if frame.pts is None or (latest is not None and latest >= (run, frame.pts)):
                    return None
                latest = (run, frame.pts)
                if frame.pts in wanted and not frame.is_corrupt:
                    images[wanted[frame.pts]] = request.convert(frame)
    except av.FFmpegError:
        return None
    return images if len(images) == len(wanted) else None


def _decode_through(
    request: ClipRequest, decoded: Generator[VideoFrame, None, None], index: PacketIndex, guess: set[int]
) -> tuple[Timeline, dict[int, Pixels]]:
    """Decode the whole file.

    Returns:
        The timeline of the decoded frames, which replaces an invalid timeline of the packets, and the existing frames
        among the positions in `guess`.
    """
    stamps: list[int] = []
    images: dict[int, Pixels] = {}
    for frame in decoded:
        if len(stamps) in guess:
            images[len(stamps)] = request.convert(frame)
        following = stamps[-1] + max(index.last_length, 1) if stamps else 0
        stamps.append(following if frame.pts is None else frame.pts)
    if not stamps:
        raise VideoError(request.path, "none of its frames can be decoded")
    rising = np.sort(np.array(stamps, dtype=np.int64))
    _check_stamps(index, rising, request.path)
    if len(rising) > 1 and rising[0] == rising[-1]:  # players then also use the order
        return even_timeline(len(rising), index), images
    return timeline_of(rising, index, None), images


def _decode_straight(
    request: ClipRequest, decoded: Generator[VideoFrame, None, None], positions: set[int]
) -> dict[int, Pixels] | None:
    """Decode from the start and return the frames at the selected positions, or None if there are fewer frames."""
    last, images = max(positions), {}
    with closing(decoded) as frames:
        for position, frame in enumerate(frames):
            if position in positions:
                images[position] = request.convert(frame)
            if position == last:
                return images
    return None


def _first_frame(stream: VideoStream, index: PacketIndex, timeline: Timeline, budget: TimeBudget) -> VideoFrame:
    """Decode only the first frame, or decode from the start if its packet cannot be identified."""
    if timeline.stamps is not None:
        stamp = int(timeline.stamps[0])
        planned = frames_of_runs(stream, index, plan_runs(index, [stamp]), budget)
        with suppress(av.FFmpegError), closing(planned) as frames:  # decoding from the start shows the error
            for _, frame in frames:
                if frame.pts == stamp:
                    return frame
    with closing(decoded_frames(budget.path, 1, budget)) as frames:
        for frame in frames:
            return frame
    raise VideoError(budget.path, "none of its frames can be decoded")


def _assemble(request: ClipRequest, timeline: Timeline, chosen: Positions, images: dict[int, Pixels]) -> DecodedClip:
    """Stack the selected frames, padded with zeros up to F if the sampling rule selects fewer."""
    pixels = np.zeros(
        (request.frames, 3, request.image_size, request.image_size), dtype=next(iter(images.values())).dtype
    )
    times = np.zeros(request.frames, dtype=np.float32)
    for row, position in enumerate(chosen.tolist()):
        pixels[row] = images[position].transpose(2, 0, 1)
        times[row] = timeline.times[position]
    mask = torch.arange(request.frames) < len(chosen)
    return DecodedClip(
        pixels=torch.from_numpy(pixels),
        frame_mask=mask,
        timestamps=torch.from_numpy(times),
        duration=timeline.duration,
    )
