"""Reader of the selected frames of a video file.

Compressed frames depend on earlier ones, back to a keyframe. Seeking to every selected frame decodes the same segments
repeatedly, since keyframes are often eight seconds apart while frames are selected every second. Decoding from the
start wastes time if keyframes are closer. Reading all packets first is cheap, since no frame is decoded, and avoids
both: each segment from a keyframe to the last selected frame is decoded once, and the decoder skips the unselected
frames that no other frame depends on.
"""

import re
from array import array
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from tvr_lightning.media.container import MAX_SECONDS, TimeBudget, VideoError, open_media, open_video, packets_of
from tvr_lightning.media.decoder import decoded_frames, frames_in_order, upright_image
from tvr_lightning.media.sampling import Declared

T = TypeVar("T")

KEPT_BYTES = 64 * 2**20  # above this limit, the packets are not kept after listing them but read again
_PACKET_BYTES = 1000  # approximate memory of a packet in addition to its data
_KEPT_FRAMES = 720  # maximum number of frames kept in memory to save a second decoding

_PACKED = re.compile(rb"DivX\d+(Build|b)\d+p")  # the pattern of FFmpeg's decoder
_NO_STAMP = -(2**63)  # FFmpeg's value for a missing timestamp
# A container may declare slightly more than its last frame: audio that ends later, or a rounded frame duration.
_TOLERATED_SECONDS = 0.5


@dataclass
class Timeline:
    """Display times of the n frames of a file, in seconds from the first frame."""

    times: NDArray[np.float64]  # (n,), ascending
    duration: float  # to the end of the last frame
    stamps: NDArray[np.int64] | None = None  # timestamps (n,) that identify decoded frames; None if only the order does


class _PlanError(Exception):
    """The frames of the selected packets are not the expected ones, and only decoding the file shows the reason."""


class OpenedVideo:
    """Video file that is opened for reading, and its n packets in decoding order.

    Attributes:
        pts: Presentation timestamps (n,) int64 in units of the stream's time base; empty if the container has none.
        keyframe: Mask (n,) bool, True if decoding can start at the packet.
        shown: Mask (n,) bool, False for frames that are decoded but not displayed (edit lists, alternate references).
        declared: Frame rate and number of frames that the container declares.
        timeline: Times of the frames, first as the packets show them. `frames` corrects it if that is wrong.
        end: Duration of the timeline of the packets.

    Raises:
        VideoError: There are no or too many packets, or the time budget is used up.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, budget: TimeBudget) -> None:
        self.container = container
        self.stream = stream
        self.budget = budget
        self._to_image = partial(upright_image, budget.path, VideoReformatter())
        table = self._list_packets()
        pts, dts, keyframe, shown, lengths = table.T
        self.keyframe, self.shown = keyframe.astype(bool), shown.astype(bool)
        if not shown.any():
            reason = f" ({self._stopped})" if self._stopped else ""
            raise VideoError(budget.path, f"its video stream has no frames{reason}")
        # True if the timestamps show that a frame is displayed in another order than it is decoded.
        known = (pts != _NO_STAMP) & (dts != _NO_STAMP)
        reordered = len(np.unique(np.where(known, pts - dts, _NO_STAMP))) > 1
        # Timestamps in AVI only count packets in decoding order.
        ordered = reordered or not stream.codec_context.has_b_frames
        # The encoder declares that it packs two frames into a packet, as DivX and Xvid do in AVI.
        extra = stream.codec_context.extradata or b""
        packed = stream.codec_context.name == "mpeg4" and bool(_PACKED.search(extra))
        if (pts == _NO_STAMP).any():
            self.pts = pts[:0]
            last = len(pts) - 1
        else:
            self.pts = pts
            last = int(np.argmax(np.where(self.shown, pts, pts.min())))
        assert stream.time_base is not None, "FFmpeg gives every demuxed stream a time base"
        self._time_base = stream.time_base
        self._last_length = int(lengths[last])
        self._rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        # As in OpenCV if the container lists no frames: computed from the duration of the file, including the audio.
        seconds = float((stream.duration or 0) * self._time_base)
        if container.duration:
            seconds = container.duration / av.time_base
        count = int(self.shown.sum())
        self.declared = Declared(float(self._rate), stream.frames or int(seconds * self._rate + 0.5) or count)
        stamps = np.unique(self.pts[self.shown]) if len(self.pts) else self.pts
        # False if the packets do not show the times or the number of the frames, so that these are estimates.
        self._exact = len(stamps) == count and not packed
        if len(stamps) == count:
            self.timeline = self._timeline_of(stamps)
            if ordered and not packed:
                self.timeline.stamps = stamps
        else:
            self.timeline = self._even_timeline(count)
        self.end = self.timeline.duration

    def _list_packets(self) -> NDArray[np.int64]:
        """Return pts, dts, keyframe, shown, and duration (n, 5) of the packets up to where the container breaks off."""
        columns = array("q")  # lists would take ten times the memory
        self._packets: list[av.Packet[Any]] | None = []
        self._stopped: str | None = None
        kept = 0
        try:
            for packet in packets_of(self.container, self.budget, self.stream):
                if packet.size == 0:  # marks the end of the stream
                    continue
                if packet.is_corrupt:
                    self._stopped = "a packet is truncated"
                    break
                # A VP8 packet without `show_frame` (RFC 6386, 9.1) is an alternate reference, which is never displayed.
                hidden = self.stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10
                columns.append(_NO_STAMP if packet.pts is None else packet.pts)
                columns.append(_NO_STAMP if packet.dts is None else packet.dts)
                columns.extend((packet.is_keyframe, not packet.is_discard and not hidden, packet.duration or 0))
                kept += packet.size + _PACKET_BYTES
                if kept > KEPT_BYTES:
                    self._packets = None
                elif self._packets is not None:
                    self._packets.append(packet)
        except av.FFmpegError as error:
            self._stopped = str(error)
        return np.array(columns, dtype=np.int64).reshape(-1, 5)

    def _even_timeline(self, count: int) -> Timeline:
        """Return the timeline of `count` consecutive frames at the rate that the container declares."""
        step = float(1 / self._rate / self._time_base)
        return self._timeline_of(np.round(np.arange(count) * step).astype(np.int64))

    def _timeline_of(self, stamps: NDArray[np.int64]) -> Timeline:
        """Return the timeline of ascending timestamps (n,); without a declared last duration, the median is used."""
        # In Python integers, since the difference of two timestamps may not fit into 64 bits.
        extent = float((int(stamps[-1]) - int(stamps[0]) + self._last_length) * self._time_base)
        if extent > MAX_SECONDS:
            found = f"lasts {extent:,.0f} s according to its timestamps"
            raise VideoError(self.budget.path, f"{found}; the maximum is {MAX_SECONDS:,} s")
        times = (stamps - stamps[0]) * float(self._time_base)
        gap = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
        return Timeline(times, float(times[-1]) + (self._last_length * float(self._time_base) or gap))

    @cached_property
    def broken(self) -> str | None:
        """Reason why the stream is shorter than its container declares, or None.

        A header that only declares too much is not an error, since every packet that it lists exists. Errors are a
        truncated or missing packet and, in containers that do not list packets, a declared end that no stream reaches.
        """
        if self._stopped:
            return f"ends early at {self.end:.2f} s ({self._stopped})"
        promised = (self.container.duration or 0) / av.time_base
        if self.stream.duration:
            promised = float(self.stream.duration * self._time_base)
        began = (self.container.start_time or 0) / av.time_base
        if "matroska" in self.container.format.name:  # its duration is the time of the end, regardless of the start
            promised -= began
        if promised - self.end <= _TOLERATED_SECONDS:
            return None
        missing = self.stream.frames > len(self.shown)
        if not missing and self.stream.frames == 0:
            last = 0.0
            with open_media(self.budget.path) as container:
                for packet in packets_of(container, self.budget):
                    if packet.pts is not None and packet.time_base is not None:
                        last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base) - began)
            missing = last < promised - _TOLERATED_SECONDS
        return f"ends early at {self.end:.2f} s of {promised:.2f} s (packets are missing)" if missing else None

    def first_frame(self) -> Image.Image:
        """Decode only the first frame, upright and in mode RGB."""
        with closing(self._decode_all()) as frames:
            for frame in frames:
                return self._to_image(frame)
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
            Position and content, in ascending order. VideoError if a frame cannot be decoded in time.
        """
        wanted = set(choose(self.timeline))
        if self.timeline.stamps is not None:
            try:
                with closing(self._planned(wanted)) as planned:
                    for position, frame in planned:
                        if frame.is_corrupt:
                            raise _PlanError
                        yield position, make(self._to_image(frame))
                return
            except _PlanError:
                self._exact = False
        if not self._exact:
            # The frames at the positions from the packet times are usually right, which saves decoding the file again.
            contents = self._decode_through(wanted if len(wanted) <= _KEPT_FRAMES else set(), make)
            wanted = set(choose(self.timeline))
            if wanted <= contents.keys():
                for position in sorted(wanted):
                    yield position, contents[position]
                return
        with closing(self._decode_all()) as decoded:
            for position, frame in enumerate(decoded):
                if position in wanted:
                    yield position, make(self._to_image(frame))
                    wanted.remove(position)
                if not wanted:
                    return
        raise VideoError(self.budget.path, "does not decode to the same frames twice")

    def plan(self, stamps: Collection[int]) -> tuple[list[list[int]], set[int]]:
        """Return runs of packets to decode, from a keyframe each, and the packets of the frames, all by index."""
        numbers = np.flatnonzero(np.isin(self.pts, np.fromiter(stamps, dtype=np.int64)) & self.shown)
        chosen = set(numbers.tolist())
        keyframes = np.flatnonzero(self.keyframe)
        segments: list[list[int]] = []
        for number in numbers.tolist():
            # The keyframe before the frame, the previous one for frames displayed before theirs (open GOP).
            earlier = keyframes[: np.searchsorted(keyframes, number, side="right")]
            usable = earlier[self.pts[earlier] <= self.pts[number]]
            start = int(usable[-1]) if len(usable) else 0
            while segments and start <= segments[-1][1]:
                start = min(start, segments.pop()[0])
            segments.append([start, number])
        runs = []
        for start, end in segments:
            # Without frames displayed before the run's own keyframe.
            leading = self.keyframe[start] & (self.pts[start : end + 1] < self.pts[start])
            runs.append([n for n in range(start, end + 1) if n in chosen or not leading[n - start]])
        return runs, chosen

    def _planned(self, positions: Collection[int]) -> Generator[tuple[int, VideoFrame], None, None]:
        """Decode only the packets that lead to the frames; _PlanError if they are damaged or not complete frames."""
        assert self.timeline.stamps is not None
        wanted = {int(self.timeline.stamps[position]): position for position in positions}
        latest: VideoFrame | None = None
        try:
            with closing(self.decode_packets(wanted)) as frames:
                for frame in frames:
                    # MPEG-4 with two frames in a packet: the frames are in the right order, but their timestamps are
                    # wrong, which only the next frame shows.
                    if frame.pts is None or (latest is not None and cast(int, latest.pts) >= frame.pts):
                        raise _PlanError
                    if latest is not None and latest.pts in wanted:
                        yield wanted.pop(latest.pts), latest
                    latest = frame
        except av.FFmpegError as error:
            raise _PlanError from error
        if latest is not None and latest.pts in wanted:
            yield wanted.pop(latest.pts), latest
        if wanted:
            raise _PlanError

    def decode_packets(self, stamps: Collection[int]) -> Generator[VideoFrame, None, None]:
        """Yield at least the frames with the given timestamps, flushing the decoder between runs of packets."""
        decoder = self.stream.codec_context
        runs, chosen = self.plan(stamps)
        with closing(self._read_packets([number for run in runs for number in run])) as packets:
            for run in runs:
                for number in [*run, None]:
                    packet = None if number is None else next(packets)
                    decoder.skip_frame = "NONREF" if packet is not None and number not in chosen else "DEFAULT"
                    for frame in decoder.decode(packet):
                        with self.budget.paused():
                            yield frame
                decoder.flush_buffers()

    def _read_packets(self, numbers: list[int]) -> Generator["av.Packet[Any]", None, None]:
        """Yield packets by ascending index, the first time from memory, or else by reading the file again."""
        kept, self._packets = self._packets, None
        if kept is not None:
            for number in numbers:
                self.budget.check()
                yield kept[number]
            return
        chosen = set(numbers)
        with open_video(self.budget.path) as (container, stream):
            listed = (packet for packet in packets_of(container, self.budget, stream) if packet.size)
            for number, packet in enumerate(listed):
                if number in chosen:
                    yield packet
        raise VideoError(self.budget.path, "became shorter while it was read")

    def _decode_all(self) -> Generator[VideoFrame, None, None]:
        """Yield every frame, from the packets in memory if nothing has been decoded yet."""
        kept, self._packets = self._packets, None
        if kept is None or self._stopped is not None:
            return decoded_frames(self.budget)
        return frames_in_order(self.stream, [*kept, None], self.budget)

    def _decode_through(self, guess: Collection[int], make: Callable[[Image.Image], T]) -> dict[int, T]:
        """Decode the whole file, correct the timeline, and return the content of the guessed positions that exist."""
        stamps: list[int] = []
        contents: dict[int, T] = {}
        with closing(self._decode_all()) as decoded:
            for frame in decoded:
                if len(stamps) in guess:
                    contents[len(stamps)] = make(self._to_image(frame))
                following = stamps[-1] + max(self._last_length, 1) if stamps else 0
                stamps.append(following if frame.pts is None else frame.pts)
        if not stamps:
            raise VideoError(self.budget.path, "none of its frames can be decoded")
        if len(stamps) > 1 and min(stamps) == max(stamps):  # players then also use the order
            self.timeline = self._even_timeline(len(stamps))
        else:
            self.timeline = self._timeline_of(np.array(sorted(stamps), dtype=np.int64))
        return contents


@contextmanager
def open_reader(path: str | Path) -> Iterator[OpenedVideo]:
    """Open a video file and list its packets. Raise VideoError if it contains no video that can be decoded."""
    budget = TimeBudget(Path(path))
    with open_video(budget.path) as (container, stream):
        yield OpenedVideo(container, stream, budget)
