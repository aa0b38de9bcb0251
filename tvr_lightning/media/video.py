"""Video files: the wanted frames of a clip as pixels, and what a file holds."""

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
from tvr_lightning.media.decoder import Pictures, decoded_frames, frames_in_order, frames_of_runs, open_video
from tvr_lightning.media.opening import MAX_ELONGATION, MAX_SECONDS, Allowance, VideoError
from tvr_lightning.media.orientation import orientation_of, upright
from tvr_lightning.media.packets import PacketIndex, index_packets, plan_runs
from tvr_lightning.media.preparation import Pixels, Preparation
from tvr_lightning.media.sampling import Declared, FrameSampling, Positions, sample_frames, steady_frames
from tvr_lightning.media.timeline import Timeline, cut_short, even_timeline, packet_timeline, timeline_of

__all__ = ["DecodedClip", "VideoError", "VideoInfo", "probe", "read_clip", "read_parts", "read_steadily"]

Span = tuple[float, float]

STRETCH_SECONDS = 240
"""How much of a file `read_steadily` holds decoded at a time."""


@dataclass
class DecodedClip:
    """F frames of one clip.

    Attributes:
        pixels: (F, 3, S, S) uint8 RGB, or float16 if resized without antialiasing; padded frames are zero.
        frame_mask: (F,) bool, True where there is a frame; a repeated last frame counts as one.
        timestamps: (F,) float32, seconds of each frame from the first frame of the file; 0 where padded.
        duration: seconds of the file's video.
    """

    pixels: Tensor
    frame_mask: Tensor
    timestamps: Tensor
    duration: float


@dataclass
class VideoInfo:
    """What a video file holds, read from its packets and its first frame.

    Attributes:
        duration: seconds from the first frame to the end of the last.
        fps: mean frames per second.
        width, height: pixels of a frame as it is shown (rotation applied).
        frames: number of frames.
        timed: False where all frames have the same time stamp; they are read in order, at the declared rate.
        has_audio: whether there is a sound track.
        broken: why the stream ends before its container says, or None.
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

    Only the stretches that lead to a wanted frame are decoded, and only wanted frames are converted to RGB. Rotation
    stored in the file is applied; pixels are taken as square, as OpenCV does for the published results.

    Args:
        path: a video file of any container and codec that FFmpeg reads.
        frames: F.
        image_size: S, pixels.
        sampling: which frames (see `FrameSampling`).
        span: start and end in seconds from the first frame; None is the whole file.
        generator: where `segment-random` draws from.
        augment: from an RGB frame to (S, S, 3), the same for all frames: a `Preparation`, or what `draw_augmentation`
            gives; None is CLIP's preparation.
        threads: decoding threads; 1 suits many worker processes.

    Returns:
        The frames with their mask and times.

    Raises:
        VideoError: the file is missing, is no video, has no frames in the span, or breaks off before a frame that was
            asked for; a frame is never given in the place of another.
        ValueError: options that do not fit each other (see `sample_frames`).
    """
    # One draw, so that a second look at the same clip takes the same random frames.
    seed = None if generator is None else int(generator.integers(2**63))
    wish = _Wish(Path(path), frames, image_size, sampling, seed, augment, threads)
    return _read(wish, lambda duration: [span])[1][0]


def read_parts(
    path: str | Path,
    divide: Callable[[float], list[Span]],
    *,
    frames: int,
    image_size: int,
    sampling: FrameSampling = "segment-centres",
) -> tuple[list[Span], list[DecodedClip]]:
    """Decode F frames of each of several parts of a file, which is opened and listed once.

    Args:
        path: a video file, as `read_clip` takes it.
        divide: from the seconds that the file's video lasts to the start and end of each part.
        frames: F, of each part.
        image_size: S, pixels.
        sampling: which frames of a part.

    Returns:
        The parts, and the clip of each as `read_clip` gives it.

    Raises:
        VideoError: as `read_clip` does, of any part.
        ValueError: options that do not fit each other (see `sample_frames`).
    """
    parts, clips = _read(_Wish(Path(path), frames, image_size, sampling), divide)
    return [part for part in parts if part is not None], clips


def read_steadily(path: str | Path, rate: int, transform: FrameTransform) -> Iterator[tuple[float, list[Pixels]]]:
    """Decode the frames on screen at 0, 1 / rate, 2 / rate ... seconds, a stretch of minutes at a time.

    Args:
        path: a video file, as `read_clip` takes it.
        rate: frames a second; where the file has fewer, its frames come several times.
        transform: from an RGB frame to what is kept of it, of any size.

    Yields:
        The seconds that the file's video lasts, and the next frames (h, w, 3).

    Raises:
        VideoError: as `read_clip` does.
    """
    start, duration = 0, float("inf")
    while start < duration:

        def stretch(lasts: float, start: int = start) -> list[Span | None]:
            return [(start, min(float(start + STRETCH_SECONDS), lasts))] if lasts > 0 else [None]

        wish = _Wish(Path(path), 1, 0, "one-fps-uniform", augment=transform, rate=rate)
        timeline, _, (positions,), images = _find(wish, stretch)
        duration = timeline.duration
        yield duration, [images[position] for position in positions.tolist()]
        start += STRETCH_SECONDS


@dataclass
class _Wish:
    """What is wanted of a file, as `read_clip` says it; `seed` is where its generator draws from.

    With a `rate`, all frames at that rate are, and not `frames` by `sampling`.
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
        self.allowance = Allowance(self.path, self.threads)
        self._picture = Pictures()

    def choose(self, span: Span | None, timeline: Timeline, declared: Declared) -> Positions:
        """Return the positions of the wanted frames; a span after the clip's end is the file's fault."""
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
        image = upright(self._picture(frame), orientation_of(frame))
        transform = self.augment or Preparation(self.image_size)
        return transform(image)


def _read(
    wish: _Wish, divide: Callable[[float], Sequence[Span | None]]
) -> tuple[Sequence[Span | None], list[DecodedClip]]:
    """Return the clip of every span that `divide` gives for the file's duration; None is the whole file."""
    timeline, spans, chosen, images = _find(wish, divide)
    return spans, [_assemble(wish, timeline, positions, images) for positions in chosen]


def _find(
    wish: _Wish, divide: Callable[[float], Sequence[Span | None]]
) -> tuple[Timeline, Sequence[Span | None], list[Positions], dict[int, Pixels]]:
    """Decode what is wanted of every span; return the file's timeline, the spans, their positions, and the frames."""
    with open_video(wish.path, wish.threads) as (container, stream):
        index = _index(container, stream, wish.allowance)
        declared = Declared(float(index.rate), index.stated)
        timeline = packet_timeline(index)
        spans = divide(timeline.duration)
        _check_reach(container, stream, index, spans, wish.allowance)
        chosen = [wish.choose(span, timeline, declared) for span in spans]
        images = _decode_planned(wish, stream, index, timeline, _all(chosen))
        looks = _looks(wish, stream, index, fresh=timeline.stamps is None)
        if images is None and index.timed and not index.ordered and not index.packed:
            images = _decode_straight(wish, next(looks), _all(chosen))
        if images is None:
            # The frames that the packets' times point at are mostly the right ones, which spares a second look.
            timeline, images = _decode_through(wish, next(looks), index, _all(chosen))
            spans = divide(timeline.duration)
            chosen = [wish.choose(span, timeline, declared) for span in spans]
        if not _all(chosen) <= images.keys():
            images = _decode_straight(wish, next(looks), _all(chosen))
    if images is None:
        raise VideoError(wish.path, "does not decode to the same frames twice")
    return timeline, spans, chosen, images


def _looks(
    wish: _Wish, stream: VideoStream, index: PacketIndex, fresh: bool
) -> Iterator[Generator[VideoFrame, None, None]]:
    """Yield one decoding of the whole file after another; from the packets at hand while the decoder is `fresh`."""
    if fresh and index.packets is not None and index.broken is None:
        yield frames_in_order(stream, [*index.packets, None], wish.allowance)
    while True:
        yield decoded_frames(wish.path, wish.threads, wish.allowance)


def _all(chosen: Sequence[Positions]) -> set[int]:
    return {position for positions in chosen for position in positions.tolist()}


def probe(path: str | Path) -> VideoInfo:
    """Read what a video file holds; decodes its first frame and no other.

    Args:
        path: a video file.

    Returns:
        Its properties; a file that breaks off is described up to there, with the reason in `broken`.

    Raises:
        VideoError: the file is missing or holds no video that decodes.
    """
    path = Path(path)
    allowance = Allowance(path)
    with open_video(path, threads=1) as (container, stream):
        index = _index(container, stream, allowance)
        timeline = packet_timeline(index)
        first = _first_frame(stream, index, timeline, allowance)
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
            broken=cut_short(container, stream, index, allowance),
        )


def _index(container: InputContainer, stream: VideoStream, allowance: Allowance) -> PacketIndex:
    index = index_packets(container, stream, allowance)
    if not index.shown.any():
        reason = f"its video stream has no frames{f' ({index.broken})' if index.broken else ''}"
        raise VideoError(allowance.path, reason)
    if index.timed:
        _check_stamps(index, index.presented(), allowance.path)
    return index


def _check_stamps(index: PacketIndex, stamps: NDArray[np.int64], path: Path) -> None:
    # In Python's integers, since the distance of two time stamps may not fit into 64 bits.
    _check_length(path, float((int(stamps[-1]) - int(stamps[0])) * index.time_base))


def _check_length(path: Path, seconds: float) -> None:
    if seconds > MAX_SECONDS:
        raise VideoError(path, f"lasts {seconds:,.0f} s according to its timestamps; the maximum is {MAX_SECONDS:,} s")


def _check_reach(
    container: InputContainer,
    stream: VideoStream,
    index: PacketIndex,
    spans: Sequence[Span | None],
    allowance: Allowance,
) -> None:
    """Raise where a wanted span reaches past the place where the stream breaks off."""
    reason = cut_short(container, stream, index, allowance)
    end = packet_timeline(index).duration
    if reason and any(span is None or span[1] > end for span in spans):
        raise VideoError(allowance.path, reason)


def _decode_planned(
    wish: _Wish, stream: VideoStream, index: PacketIndex, timeline: Timeline, positions: set[int]
) -> dict[int, Pixels] | None:
    """Decode the stretches that lead to the wanted positions.

    Returns:
        The frames by position, or None where one of them did not come out and the file must be decoded straight
        through to learn why (a stream whose packets are no whole frames, a damaged one).
    """
    if timeline.stamps is None:
        return None
    wanted = {int(timeline.stamps[position]): position for position in positions}
    images: dict[int, Pixels] = {}
    try:
        latest: tuple[int, int] | None = None
        with closing(frames_of_runs(stream, index, plan_runs(index, wanted), wish.allowance)) as frames:
            for run, frame in frames:
                # MPEG-4 with two pictures in a packet: the order that frames come in is right, their stamps are not.
                if frame.pts is None or (latest is not None and latest >= (run, frame.pts)):
                    return None
                latest = (run, frame.pts)
                if frame.pts in wanted and not frame.is_corrupt:
                    images[wanted[frame.pts]] = wish.convert(frame)
    except av.FFmpegError:
        return None
    return images if len(images) == len(wanted) else None


def _decode_through(
    wish: _Wish, decoded: Generator[VideoFrame, None, None], index: PacketIndex, guess: set[int]
) -> tuple[Timeline, dict[int, Pixels]]:
    """Decode the whole file.

    Returns:
        The timeline that the decoded frames tell, where that of the packets does not hold, and the frames at those
        positions of the `guess` that there are.
    """
    stamps: list[int] = []
    images: dict[int, Pixels] = {}
    for frame in decoded:
        if len(stamps) in guess:
            images[len(stamps)] = wish.convert(frame)
        following = stamps[-1] + max(index.last_length, 1) if stamps else 0
        stamps.append(following if frame.pts is None else frame.pts)
    if not stamps:
        raise VideoError(wish.path, "none of its frames can be decoded")
    rising = np.sort(np.array(stamps, dtype=np.int64))
    _check_stamps(index, rising, wish.path)
    if len(rising) > 1 and rising[0] == rising[-1]:  # players then go by order, too
        return even_timeline(len(rising), index), images
    return timeline_of(rising, index, None), images


def _decode_straight(
    wish: _Wish, decoded: Generator[VideoFrame, None, None], positions: set[int]
) -> dict[int, Pixels] | None:
    """Decode from the beginning and return the frames at the wanted positions, or None where there are fewer frames."""
    last, images = max(positions), {}
    with closing(decoded) as frames:
        for position, frame in enumerate(frames):
            if position in positions:
                images[position] = wish.convert(frame)
            if position == last:
                return images
    return None


def _first_frame(stream: VideoStream, index: PacketIndex, timeline: Timeline, allowance: Allowance) -> VideoFrame:
    """Decode the first frame alone, or straight from the beginning where its packet cannot be told."""
    if timeline.stamps is not None:
        stamp = int(timeline.stamps[0])
        planned = frames_of_runs(stream, index, plan_runs(index, [stamp]), allowance)
        with suppress(av.FFmpegError), closing(planned) as frames:  # what is wrong is told by decoding straight
            for _, frame in frames:
                if frame.pts == stamp:
                    return frame
    with closing(decoded_frames(allowance.path, 1, allowance)) as frames:
        for frame in frames:
            return frame
    raise VideoError(allowance.path, "none of its frames can be decoded")


def _assemble(wish: _Wish, timeline: Timeline, chosen: Positions, images: dict[int, Pixels]) -> DecodedClip:
    """Stack the chosen frames, padded with zeros up to F where the strategy gives fewer."""
    pixels = np.zeros((wish.frames, 3, wish.image_size, wish.image_size), dtype=next(iter(images.values())).dtype)
    times = np.zeros(wish.frames, dtype=np.float32)
    for row, position in enumerate(chosen.tolist()):
        pixels[row] = images[position].transpose(2, 0, 1)
        times[row] = timeline.times[position]
    mask = torch.arange(wish.frames) < len(chosen)
    return DecodedClip(
        pixels=torch.from_numpy(pixels),
        frame_mask=mask,
        timestamps=torch.from_numpy(times),
        duration=timeline.duration,
    )
