"""Reading of video files: the selected frames of a clip as pixels, and the properties of a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar, cast

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tvr_lightning.media.augment import FrameTransform
from tvr_lightning.media.container import MAX_SECONDS, TimeBudget, VideoError
from tvr_lightning.media.decoder import FrameConverter, decoded_frames, frames_in_order, frames_of_runs, open_video
from tvr_lightning.media.orientation import orientation_of
from tvr_lightning.media.packets import PacketIndex, index_packets, plan_runs
from tvr_lightning.media.preparation import Pixels, Preparation
from tvr_lightning.media.sampling import Declared, Positions, positions_at_rate, sample_frames
from tvr_lightning.media.timeline import Timeline, cut_short, even_timeline, packet_timeline, timeline_of
from tvr_lightning.option_types import FrameSampling

__all__ = ["DecodedClip", "TimedFrame", "VideoError", "VideoInfo", "frames_at_rate", "probe", "read_clip", "read_parts"]

Span = tuple[float, float]

T = TypeVar("T")

_KEPT_FRAMES = 720  # maximum number of frames that `frames_at_rate` keeps in memory to save a second decoding
_UNSTABLE = "does not decode to the same frames twice"


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
    """Decode F frames of a clip: only the segments that lead to a selected frame, converting only selected frames.

    The rotation stored in the file is applied; pixels are treated as square, as in OpenCV, which the published results
    use. `span` is in seconds from the first frame; `augment` replaces CLIP's preparation of each frame.

    Raises:
        VideoError: The file is missing, is not a video, or ends before a selected frame, which is never replaced.
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
    """Decode F frames of each of several parts of a file, opened once; `divide` maps its duration to the parts."""
    parts, clips = _read(ClipRequest(Path(path), frames, image_size, sampling), divide)
    return [part for part in parts if part is not None], clips


@dataclass
class TimedFrame(Generic[T]):
    """Content on screen at one moment.

    Attributes:
        time: Seconds from the first frame of the file.
        content: Result of `make` for the frame.
    """

    time: float
    content: T


def frames_at_rate(
    path: str | Path, rate: float, make: Callable[[Image.Image], T]
) -> Generator[TimedFrame[T], None, float]:
    """Yield the content on screen at 0, 1 / rate, 2 / rate, ... seconds.

    Frames are converted one by one, so that memory use does not grow with their number.

    Args:
        path: Video file, as for `read_clip`.
        rate: Frames per second. If the file has fewer, frames are repeated.
        make: Function from an upright image in mode RGB to the content.

    Returns:
        Duration of the file's video in seconds, as the generator's return value.

    Raises:
        VideoError: The file cannot be read or breaks off.
    """
    path = Path(path)
    budget, to_image = TimeBudget(path), FrameConverter(path)

    def convert(frame: VideoFrame) -> T:
        return make(to_image(frame))

    with open_video(path, 1) as (container, stream):
        index = _index(container, stream, budget)
        timeline = packet_timeline(index)
        _check_length(path, timeline.duration)
        _check_reach(container, stream, index, [None], budget)
        positions = positions_at_rate(timeline.times, timeline.duration, rate).tolist()
        passes = _passes(path, 1, stream, index, budget)
        number = 0
        with suppress(_PlanError):
            for content in _repeated(
                _by_packets(stream, index, timeline, positions, passes, budget), positions, convert
            ):
                yield TimedFrame(number / rate, content)
                number += 1
        if number < len(positions):
            guess = set(positions) if len(positions) <= _KEPT_FRAMES else set()
            timeline, images = _decode_through(path, next(passes), index, guess, convert)
            positions = positions_at_rate(timeline.times, timeline.duration, rate).tolist()
            contents: Iterator[T] = (images[position] for position in positions[number:])
            if not images.keys() >= set(positions):
                contents = _repeated(enumerate(next(passes)), positions[number:], convert)
            for content in contents:
                yield TimedFrame(number / rate, content)
                number += 1
    if number < len(positions):
        raise VideoError(path, _UNSTABLE)
    return timeline.duration


def _repeated(
    frames: Iterable[tuple[int, VideoFrame]], positions: Sequence[int], convert: Callable[[VideoFrame], T]
) -> Iterator[T]:
    """Yield the content at each of the ascending positions, which can repeat, as soon as it is decoded."""
    contents: dict[int, T] = {}
    wanted, number = set(positions), 0
    for position, frame in frames:
        if position in wanted:
            contents[position] = convert(frame)
        while number < len(positions) and positions[number] in contents:
            yield contents[positions[number]]
            number += 1
            if positions[number - 1] not in positions[number : number + 1]:
                del contents[positions[number - 1]]
        if number == len(positions):
            return


@dataclass
class ClipRequest:
    """Request for frames of a file, with the options of `read_clip`. `seed` is the seed for its random generator."""

    path: Path
    frames: int
    image_size: int
    sampling: FrameSampling
    seed: int | None = None
    augment: FrameTransform | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        self.budget = TimeBudget(self.path, self.threads)
        self._to_image = FrameConverter(self.path)
        self._transform = self.augment or Preparation(self.image_size)

    def choose(self, span: Span | None, timeline: Timeline, declared: Declared) -> Positions:
        """Return the positions of the selected frames. A span after the end of the clip is an error of the file."""
        _check_length(self.path, timeline.duration)
        if span is not None and span[0] >= timeline.duration > 0:
            end = f"its last frame, at {timeline.duration:.3f} s"
            raise VideoError(self.path, f"the span {span} begins after {end}")
        generator = None if self.seed is None else np.random.default_rng(self.seed)
        return sample_frames(timeline.times, timeline.duration, self.frames, self.sampling, span, generator, declared)

    def convert(self, frame: VideoFrame) -> Pixels:
        """Return a frame upright and transformed, (S, S, 3)."""
        return self._transform(self._to_image(frame))


def _read(
    request: ClipRequest, divide: Callable[[float], Sequence[Span | None]]
) -> tuple[Sequence[Span | None], list[DecodedClip]]:
    """Return the clip of every span that `divide` returns for the file's duration. None means the whole file."""
    with open_video(request.path, request.threads) as (container, stream):
        index = _index(container, stream, request.budget)
        declared = Declared(float(index.rate), index.stated)
        timeline = packet_timeline(index)
        spans = divide(timeline.duration)
        _check_reach(container, stream, index, spans, request.budget)
        chosen = [request.choose(span, timeline, declared) for span in spans]
        wanted = _all(chosen)
        passes = _passes(request.path, request.threads, stream, index, request.budget)
        images: dict[int, Pixels] = {}
        with suppress(_PlanError):
            frames = _by_packets(stream, index, timeline, wanted, passes, request.budget)
            images = {position: request.convert(frame) for position, frame in frames if position in wanted}
        if not wanted <= images.keys():
            # The frames at the positions from the packet times are usually right, which saves decoding the file again.
            timeline, images = _decode_through(request.path, next(passes), index, wanted, request.convert)
            spans = divide(timeline.duration)
            chosen = [request.choose(span, timeline, declared) for span in spans]
            wanted = _all(chosen)
        if not wanted <= images.keys():
            frames = islice(enumerate(next(passes)), max(wanted) + 1)
            images = {position: request.convert(frame) for position, frame in frames if position in wanted}
    if not wanted <= images.keys():
        raise VideoError(request.path, _UNSTABLE)
    return spans, [_assemble(request, timeline, positions, images) for positions in chosen]


def _passes(
    path: Path, threads: int, stream: VideoStream, index: PacketIndex, budget: TimeBudget
) -> Iterator[Generator[VideoFrame, None, None]]:
    """Yield repeated decodings of the whole file, the first one from packets in memory if nothing was decoded yet."""
    if packet_timeline(index).stamps is None and index.packets is not None and index.broken is None:
        yield frames_in_order(stream, [*index.packets, None], budget)
    while True:
        yield decoded_frames(path, threads, budget)


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


class _PlanError(Exception):
    """The frames of the selected packets are not the expected ones, and only decoding the file shows the reason."""


def _by_packets(
    stream: VideoStream,
    index: PacketIndex,
    timeline: Timeline,
    positions: Collection[int],
    passes: Iterator[Generator[VideoFrame, None, None]],
    budget: TimeBudget,
) -> Iterator[tuple[int, VideoFrame]]:
    """Yield frames with their positions according to the packets, at least the selected ones if the packets are right.

    Raises:
        _PlanError: The stream is damaged, or its packets are not complete frames.
    """
    if timeline.stamps is None:
        if index.timed and not index.packed:
            yield from islice(enumerate(next(passes)), max(positions) + 1)
        return
    wanted = {int(timeline.stamps[position]): position for position in positions}
    latest: tuple[int, int] | None = None
    held: VideoFrame | None = None
    try:
        with closing(frames_of_runs(stream, index, plan_runs(index, wanted), budget)) as frames:
            for run, frame in frames:
                # MPEG-4 with two frames in a packet: the frames are in the right order, but their timestamps are wrong,
                # which only the next frame shows.
                if frame.pts is None or (latest is not None and latest >= (run, frame.pts)):
                    raise _PlanError
                if held is not None:
                    yield wanted[cast(int, held.pts)], held
                latest, held = (run, frame.pts), frame if frame.pts in wanted and not frame.is_corrupt else None
    except av.FFmpegError as error:
        raise _PlanError from error
    if held is not None:
        yield wanted[cast(int, held.pts)], held


def _decode_through(
    path: Path,
    decoded: Generator[VideoFrame, None, None],
    index: PacketIndex,
    guess: set[int],
    convert: Callable[[VideoFrame], T],
) -> tuple[Timeline, dict[int, T]]:
    """Decode the whole file.

    Returns:
        The timeline of the decoded frames, which replaces an invalid timeline of the packets, and the existing frames
        among the positions in `guess`.
    """
    stamps: list[int] = []
    images: dict[int, T] = {}
    for frame in decoded:
        if len(stamps) in guess:
            images[len(stamps)] = convert(frame)
        following = stamps[-1] + max(index.last_length, 1) if stamps else 0
        stamps.append(following if frame.pts is None else frame.pts)
    if not stamps:
        raise VideoError(path, "none of its frames can be decoded")
    rising = np.sort(np.array(stamps, dtype=np.int64))
    _check_stamps(index, rising, path)
    if len(rising) > 1 and rising[0] == rising[-1]:  # players then also use the order
        return even_timeline(len(rising), index), images
    return timeline_of(rising, index, None), images


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
