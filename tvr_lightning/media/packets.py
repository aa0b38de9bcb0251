"""Packets of a video stream: the display times of its frames, and the packets required to decode selected frames.

Compressed frames depend on earlier ones, back to a keyframe. Seeking to every selected frame decodes the same segments
repeatedly, since keyframes are often eight seconds apart while frames are selected every second. Decoding from the
start wastes time if keyframes are closer. Reading all packets first is cheap, since no frame is decoded, and avoids
both: each segment from a keyframe to the last selected frame is decoded once, and the decoder skips the unselected
frames that no other frame depends on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvr_lightning.media.container import MAX_PACKETS, MAX_SECONDS, TimeBudget, VideoError, open_media, packets_of

# Above these limits, the packets are not kept after indexing but read again.
KEPT_BYTES = 64 * 2**20
KEPT_PACKETS = 2**16

_PACKED = re.compile(rb"DivX\d+(Build|b)\d+p")  # the pattern of FFmpeg's decoder
_NO_STAMP = -(2**63)  # FFmpeg's value for a missing timestamp
# A container may declare slightly more than its last frame: audio that ends later, or a rounded frame duration.
_TOLERATED_SECONDS = 0.5


@dataclass
class Timeline:
    """Display times of the n frames of a file.

    Attributes:
        times: Seconds from the first frame, (n,), ascending.
        duration: Seconds from the first frame to the end of the last.
        stamps: Timestamps (n,) that identify decoded frames, or None if only their order does.
        exact: False if the packets do not show the times or the number of the frames, so that these are estimates.
    """

    times: NDArray[np.float64]
    duration: float
    stamps: NDArray[np.int64] | None
    exact: bool


@dataclass
class PacketIndex:
    """The n packets of a video stream in decoding order.

    Attributes:
        path: The file.
        pts: Presentation timestamps (n,) int64 in units of `time_base`; empty if the container has none.
        keyframe: Mask (n,) bool, True if decoding can start at the packet.
        shown: Mask (n,) bool, False for frames that are decoded but not displayed (edit lists, alternate references).
        ordered: True if the timestamps give the display order. In AVI, they only count packets in decoding order.
        packed: True if a packet can contain two frames, as in AVI, so that packet times are not frame times.
        time_base: Seconds per unit.
        rate: Frame rate of the container, for files without useful timestamps.
        stated: Number of frames that the container declares, which can be larger than the actual number.
        last_length: Duration of the last frame in units of `time_base`, 0 if unknown.
        broken: Reason why the stream stopped before its end, or None.
        packets: The packets, or None if there are too many to keep.
    """

    path: Path
    pts: NDArray[np.int64]
    keyframe: NDArray[np.bool_]
    shown: NDArray[np.bool_]
    ordered: bool
    packed: bool
    time_base: Fraction
    rate: Fraction
    stated: int
    last_length: int
    broken: str | None
    packets: list[av.Packet] | None

    def timeline(self) -> Timeline:
        """Return the timeline of the packets, evenly spaced if timestamps are missing or repeated."""
        count = int(self.shown.sum())
        stamps = np.unique(self.pts[self.shown]) if len(self.pts) else self.pts
        if len(stamps) < count:
            return self.even_timeline(count, exact=False)
        return self.timeline_of(stamps, identify=self.ordered and not self.packed, exact=not self.packed)

    def even_timeline(self, count: int, exact: bool) -> Timeline:
        """Return the timeline of `count` consecutive frames at the rate that the container declares."""
        step = 1 / self.rate / self.time_base
        stamps = np.round(np.arange(count) * float(step)).astype(np.int64)
        return self.timeline_of(stamps, identify=False, exact=exact)

    def timeline_of(self, stamps: NDArray[np.int64], identify: bool, exact: bool) -> Timeline:
        """Return the timeline of ascending timestamps (n,); without a declared last duration, the median is used."""
        # In Python integers, since the difference of two timestamps may not fit into 64 bits.
        extent = float((int(stamps[-1]) - int(stamps[0]) + self.last_length) * self.time_base)
        if extent > MAX_SECONDS:
            found = f"lasts {extent:,.0f} s according to its timestamps"
            raise VideoError(self.path, f"{found}; the maximum is {MAX_SECONDS:,} s")
        times = (stamps - stamps[0]) * float(self.time_base)
        gap = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
        last = self.last_length * float(self.time_base) or gap
        return Timeline(times, float(times[-1]) + last, stamps if identify else None, exact)


def index_packets(container: InputContainer, stream: VideoStream, budget: TimeBudget) -> PacketIndex:
    """List the packets of a stream without decoding them.

    If the container breaks off, the list ends there and `broken` contains the reason.

    Raises:
        VideoError: There are no or too many packets, or the time budget is used up.
    """
    columns = array("q")  # five values per packet; lists would take ten times the memory
    packets: list[av.Packet] = []
    count, kept, broken = 0, 0, None
    decoder = stream.codec_context
    if "mp4" in container.format.name:  # its header lists every packet
        check_packets(stream.frames, budget.path)
    try:
        for packet in packets_of(container, stream):
            budget.check()
            if packet.size == 0:  # marks the end of the stream
                continue
            count += 1
            check_packets(count, budget.path)
            if packet.is_corrupt:
                broken = "a packet is truncated"
                break
            # A VP8 packet without `show_frame` (RFC 6386, 9.1) is an alternate reference, which is never displayed.
            hidden = decoder.name == "vp8" and not bytes(packet)[0] & 0x10
            columns.append(_NO_STAMP if packet.pts is None else packet.pts)
            columns.append(_NO_STAMP if packet.dts is None else packet.dts)
            columns.extend((packet.is_keyframe, not packet.is_discard and not hidden, packet.duration or 0))
            kept += packet.size
            if kept <= KEPT_BYTES and count <= KEPT_PACKETS:
                packets.append(packet)
            else:
                packets.clear()
    except av.FFmpegError as error:
        broken = str(error)
    pts, dts, keyframes, not_hidden, lengths = np.array(columns, dtype=np.int64).reshape(-1, 5).T
    keyframe, shown = keyframes.astype(bool), not_hidden.astype(bool)
    if not shown.any():
        raise VideoError(budget.path, f"its video stream has no frames{f' ({broken})' if broken else ''}")
    known = (pts != _NO_STAMP) & (dts != _NO_STAMP)
    # True if the timestamps show that a frame is displayed in another order than it is decoded.
    reordered = len(np.unique(np.where(known, pts - dts, _NO_STAMP))) > 1
    last = len(pts) - 1
    if (pts == _NO_STAMP).any():
        pts = pts[:0]
    else:
        last = int(np.argmax(np.where(shown, pts, pts.min())))
    assert stream.time_base is not None, "FFmpeg gives every demuxed stream a time base"
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    # As in OpenCV if the container lists no frames: computed from the duration of the file, including the audio.
    seconds = (
        container.duration / av.time_base if container.duration else float(stream.duration or 0) * stream.time_base
    )
    return PacketIndex(
        path=budget.path,
        pts=pts,
        keyframe=keyframe,
        shown=shown,
        ordered=reordered or not decoder.has_b_frames,
        # The encoder declares that it packs two frames into a packet, as DivX and Xvid do.
        packed=decoder.name == "mpeg4" and bool(_PACKED.search(decoder.extradata or b"")),
        time_base=stream.time_base,
        rate=rate,
        stated=stream.frames or int(seconds * rate + 0.5) or int(shown.sum()),
        last_length=int(lengths[last]),
        broken=broken,
        packets=packets if len(packets) == len(keyframe) else None,
    )


def check_packets(count: int, path: Path) -> None:
    """Raise VideoError if a stream has too many packets."""
    if count > MAX_PACKETS:
        found = f"a stream of at least {count:,} packets"
        raise VideoError(path, f"contains {found}; the maximum is {MAX_PACKETS:,}, nine hours at 60 frames per second")


def plan_runs(index: PacketIndex, wanted: Collection[int]) -> tuple[list[list[int]], set[int]]:
    """Select the packets to decode for frames by their timestamps, which are valid, ordered, and in the index.

    Returns:
        Indices of packets that are decoded consecutively, starting with a keyframe, in decoding order; the decoder is
        flushed between these runs. Indices of the packets of the wanted frames.
    """
    numbers = np.flatnonzero(np.isin(index.pts, np.fromiter(wanted, dtype=np.int64)) & index.shown)
    chosen = set(numbers.tolist())
    keyframes = np.flatnonzero(index.keyframe)
    segments: list[list[int]] = []
    for number in numbers.tolist():
        # The keyframe before the frame, the previous one for frames displayed before theirs (open GOP).
        earlier = keyframes[: np.searchsorted(keyframes, number, side="right")]
        usable = earlier[index.pts[earlier] <= index.pts[number]]
        start = int(usable[-1]) if len(usable) else 0
        while segments and start <= segments[-1][1]:
            start = min(start, segments.pop()[0])
        segments.append([start, number])
    runs = []
    for start, end in segments:
        # Without frames displayed before the run's own keyframe.
        leading = index.keyframe[start] & (index.pts[start : end + 1] < index.pts[start])
        runs.append([n for n in range(start, end + 1) if n in chosen or not leading[n - start]])
    return runs, chosen


def cut_short(container: InputContainer, stream: VideoStream, index: PacketIndex, budget: TimeBudget) -> str | None:
    """Return the reason why the stream is shorter than its container declares, or None.

    A header that only declares too much is not an error, since every packet that it lists exists. Errors are a
    truncated or missing packet and, in containers that do not list packets, a declared end that no stream reaches.
    """
    end = index.timeline().duration
    if index.broken:
        return f"ends early at {end:.2f} s ({index.broken})"
    promised = float(stream.duration * index.time_base) if stream.duration else (container.duration or 0) / av.time_base
    began = (container.start_time or 0) / av.time_base
    if "matroska" in container.format.name:  # its duration is the time of the end, regardless of the start time
        promised -= began
    if promised - end <= _TOLERATED_SECONDS:
        return None
    missing = stream.frames > len(index.shown)
    if not missing and stream.frames == 0:  # whether no stream reaches the end
        last = 0.0
        with open_media(budget.path) as again:
            for packet in packets_of(again):
                budget.check()
                if packet.pts is not None and packet.time_base is not None:
                    last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base) - began)
        missing = last < promised - _TOLERATED_SECONDS
    return f"ends early at {end:.2f} s of {promised:.2f} s (packets are missing)" if missing else None
