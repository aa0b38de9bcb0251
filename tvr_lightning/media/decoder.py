"""Decoding of video files (selected frames or all), and conversion of frames to upright images."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from PIL import Image

from tvr_lightning.media.container import PIXEL_LIMIT, TimeBudget, VideoError, open_video, packets_of, words_of
from tvr_lightning.media.packets import Timeline, cut_short, index_packets, plan_runs

T = TypeVar("T")

MAX_ELONGATION = 100
"""Maximum ratio of the long side of a frame to the short one, since resizing keeps the ratio."""

_KEPT_FRAMES = 720  # maximum number of frames kept in memory to save a second decoding

# By clockwise quarter turns, without and with swapping left and right before.
_TURNED = (None, Image.Transpose.ROTATE_270, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_90)
_MIRRORED = (
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.TRANSPOSE,
)
SIDEWAYS = (_TURNED[1], _TURNED[3], _MIRRORED[1], _MIRRORED[3])
"""Orientations that swap width and height."""


def orientation_of(frame: VideoFrame) -> Image.Transpose | None:
    """Return the transform to the displayed frame, from its display matrix (ISO/IEC 14496-12, `tkhd`), or None.

    The matrix maps a stored pixel (x, y) to (a x + c y, b x + d y), with y pointing down. Other angles, which no camera
    writes, are rounded to quarter turns. A frame is upright if the file declares no matrix or a singular one.
    """
    # Loop over the names, since older PyAV cannot find entries by name, and the stubs list only some of the types.
    matrices = [bytes(data) for data in cast(Any, frame.side_data) if data.type.name == "DISPLAYMATRIX"]
    if not matrices:
        return None
    a, b, _, c, d = np.frombuffer(matrices[0], dtype=np.int32)[:5].astype(float)
    determinant = a * d - b * c
    if determinant < 0:
        return _MIRRORED[round(np.degrees(np.arctan2(-b, -a)) / 90) % 4]
    return _TURNED[round(np.degrees(np.arctan2(b, a)) / 90) % 4] if determinant else None


class FrameConverter:
    """Converter of the decoded frames of a file to upright images, which reuses its expensive conversion tables."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reformatter = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> Image.Image:
        """Return a frame as an upright image in mode RGB, equal to PyAV's `to_image`, but several times faster.

        One thread, since pools of many workers slow each other down; three bytes per pixel, since FFmpeg's conversion
        to four does not write the last columns for some widths.
        """
        check_shape(self._path, frame)
        converted = self._reformatter.reformat(frame, format="rgb24", threads=1)
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
    stream: VideoStream, packets: Iterable[av.Packet | None], budget: TimeBudget
) -> Generator[VideoFrame, None, None]:
    """Yield every frame decoded from the packets of a stream, in display order.

    Args:
        stream: Stream from which nothing has been decoded.
        packets: All packets of the stream, followed by an empty packet or None.
        budget: Time budget.

    Raises:
        VideoError: A frame cannot be decoded, or the time budget is used up.
    """
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
        reason = words_of(error) if stream.codec_context.width else f"it is damaged or too large: {PIXEL_LIMIT}"
        raise VideoError(budget.path, f"cannot be decoded{where} ({reason})") from error


def decoded_frames(path: Path, threads: int, budget: TimeBudget) -> Generator[VideoFrame, None, None]:
    """Yield every frame of a file in display order."""
    with open_video(path, threads) as (container, stream):
        yield from frames_in_order(stream, packets_of(container, stream), budget)


class _PlanError(Exception):
    """The frames of the selected packets are not the expected ones, and only decoding the file shows the reason."""


class VideoReader:
    """Reader of selected frames of an opened video file.

    Attributes:
        index: Packets of the stream.
        timeline: Times of the frames, first as the packets show them. `frames` corrects it if that is wrong.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, budget: TimeBudget) -> None:
        self.container, self.stream, self.budget = container, stream, budget
        self.index = index_packets(container, stream, budget)
        self.timeline = self.index.timeline()
        self._fresh = True
        self._to_image = FrameConverter(budget.path)

    @cached_property
    def broken(self) -> str | None:
        """Reason why the stream ends before the end that its container declares, or None."""
        return cut_short(self.container, self.stream, self.index, self.budget)

    def first_frame(self) -> VideoFrame:
        """Decode only the first frame, or decode from the start if its packet cannot be identified."""
        stamps = self.timeline.stamps
        if stamps is not None:
            with suppress(av.FFmpegError), closing(self._frames_of_packets(stamps[:1].tolist())) as frames:
                for frame in frames:
                    if frame.pts == stamps[0]:
                        return frame
        with closing(self._all_frames()) as frames:
            for frame in frames:
                return frame
        raise VideoError(self.budget.path, "none of its frames can be decoded")

    def frames(
        self, choose: Callable[[Timeline], Collection[int]], make: Callable[[Image.Image], T]
    ) -> Iterator[tuple[int, T]]:
        """Decode selected frames, converting only these.

        Args:
            choose: Function that returns the positions of the selected frames. It is called again if decoding shows
                that the packets were misleading; the frames are then yielded again from the first one.
            make: Function from an upright image in mode RGB to the content.

        Yields:
            Position and content, in ascending order.

        Raises:
            VideoError: A selected frame cannot be decoded, or the time budget is used up.
        """
        wanted = set(choose(self.timeline))
        stamps = self.timeline.stamps
        if stamps is not None:
            try:
                with closing(self._planned({int(stamps[position]): position for position in wanted})) as planned:
                    for position, frame in planned:
                        yield position, make(self._to_image(frame))
                return
            except _PlanError:
                self.timeline.exact = False
        if not self.timeline.exact:
            # The frames at the positions from the packet times are usually right, which saves decoding the file again.
            contents = self._decode_through(wanted if len(wanted) <= _KEPT_FRAMES else set(), make)
            wanted = set(choose(self.timeline))
            if wanted <= contents.keys():
                for position in sorted(wanted):
                    yield position, contents[position]
                return
        with closing(self._all_frames()) as decoded:
            for position, frame in enumerate(decoded):
                if position in wanted:
                    yield position, make(self._to_image(frame))
                    wanted.remove(position)
                if not wanted:
                    return
        raise VideoError(self.budget.path, "does not decode to the same frames twice")

    def _planned(self, wanted: dict[int, int]) -> Generator[tuple[int, VideoFrame], None, None]:
        """Decode only the packets that lead to the frames with the given timestamps, whose positions are yielded.

        Raises:
            _PlanError: The stream is damaged, or its packets are not complete frames.
            VideoError: The time budget is used up, or the file changes while it is read.
        """
        latest: int | None = None
        held: tuple[int, VideoFrame] | None = None
        try:
            with closing(self._frames_of_packets(wanted)) as frames:
                for frame in frames:
                    # MPEG-4 with two frames in a packet: the frames are in the right order, but their timestamps are
                    # wrong, which only the next frame shows.
                    if frame.pts is None or (latest is not None and latest >= frame.pts):
                        raise _PlanError
                    if held is not None:
                        yield held
                    latest, held = frame.pts, None
                    if frame.pts in wanted and not frame.is_corrupt:
                        held = (wanted.pop(frame.pts), frame)
        except av.FFmpegError as error:
            raise _PlanError from error
        if held is not None:
            yield held
        if wanted:
            raise _PlanError

    def _frames_of_packets(self, stamps: Collection[int]) -> Generator[VideoFrame, None, None]:
        """Yield at least the frames with the given timestamps, flushing the decoder between runs of packets."""
        self._fresh = False
        decoder = self.stream.codec_context
        runs, chosen = plan_runs(self.index, stamps)
        with closing(self._packets([number for run in runs for number in run])) as packets:
            for run in runs:
                for number in run:
                    packet = next(packets, None)
                    if packet is None:
                        raise VideoError(self.budget.path, "became shorter while it was read")
                    decoder.skip_frame = "DEFAULT" if number in chosen else "NONREF"
                    for frame in decoder.decode(packet):
                        with self.budget.paused():
                            yield frame
                for frame in decoder.decode(None):
                    with self.budget.paused():
                        yield frame
                decoder.flush_buffers()

    def _packets(self, numbers: list[int]) -> Generator[av.Packet, None, None]:
        """Yield packets by ascending index, from memory or by reading the file again."""
        if self.index.packets is not None:
            for number in numbers:
                self.budget.check()
                yield self.index.packets[number]
            return
        chosen = set(numbers)
        with open_video(self.budget.path) as (container, stream):
            listed = (packet for packet in packets_of(container, stream) if packet.size)
            for number, packet in enumerate(listed):
                self.budget.check()
                if number in chosen:
                    yield packet

    def _all_frames(self) -> Generator[VideoFrame, None, None]:
        """Yield every frame, from the packets in memory if nothing has been decoded yet."""
        packets = self.index.packets
        if self._fresh and packets is not None and self.index.broken is None:
            self._fresh = False
            return frames_in_order(self.stream, [*packets, None], self.budget)
        return decoded_frames(self.budget.path, self.stream.codec_context.thread_count, self.budget)

    def _decode_through(self, guess: Collection[int], make: Callable[[Image.Image], T]) -> dict[int, T]:
        """Decode the whole file, correct the timeline, and return the content of the guessed positions that exist."""
        stamps: list[int] = []
        contents: dict[int, T] = {}
        with closing(self._all_frames()) as decoded:
            for frame in decoded:
                if len(stamps) in guess:
                    contents[len(stamps)] = make(self._to_image(frame))
                following = stamps[-1] + max(self.index.last_length, 1) if stamps else 0
                stamps.append(following if frame.pts is None else frame.pts)
        if not stamps:
            raise VideoError(self.budget.path, "none of its frames can be decoded")
        rising = np.sort(np.array(stamps, dtype=np.int64))
        if len(rising) > 1 and rising[0] == rising[-1]:  # players then also use the order
            self.timeline = self.index.even_timeline(len(rising), exact=True)
        else:
            self.timeline = self.index.timeline_of(rising, identify=False, exact=True)
        return contents


@contextmanager
def open_reader(path: Path, threads: int = 1) -> Iterator[VideoReader]:
    """Open a video file and list its packets.

    Raises:
        VideoError: The file is missing, contains no video that can be decoded, or is too large.
    """
    budget = TimeBudget(path, threads)
    with open_video(path, threads) as (container, stream):
        yield VideoReader(container, stream, budget)
