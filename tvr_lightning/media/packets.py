"""Packets of a video stream: their display times, and the packets required to decode selected frames.

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

from tvr_lightning.media.container import MAX_PACKETS, TimeBudget, VideoError, packets_of

# Above these limits, the packets are not kept after indexing but read again.
KEPT_BYTES = 64 * 2**20
KEPT_PACKETS = 2**16

_PACKED = re.compile(rb"DivX\d+(Build|b)\d+p")  # the pattern of FFmpeg's decoder

_NO_STAMP = -(2**63)  # FFmpeg's value for a missing timestamp


@dataclass
class PacketIndex:
    """The n packets of a video stream in decoding order.

    Attributes:
        pts: Presentation timestamps (n,) int64 in units of `time_base`; empty if the container has none.
        keyframe: Mask (n,) bool, True if decoding can start at the packet.
        ordered: True if the timestamps give the display order. In AVI, they only count packets in decoding order.
        packed: True if a packet can contain two frames, as in AVI, so that packet times are not frame times.
        shown: Mask (n,) bool, False for frames that are decoded but not displayed (edit lists, alternate references).
        time_base: Seconds per unit.
        rate: Frame rate of the container, for files without useful timestamps.
        stated: Number of frames that the container declares, which can be larger than the actual number.
        last_length: Duration of the last frame in units of `time_base`, 0 if unknown.
        broken: Reason why the stream stopped before its end, or None.
        packets: The packets, or None if there are too many to keep.
    """

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

    @property
    def timed(self) -> bool:
        """True if every displayed frame has its own timestamp."""
        return len(self.pts) > 0 and len(np.unique(self.pts[self.shown])) == int(self.shown.sum()) > 0

    @property
    def stopped(self) -> bool:
        """True if there are several frames and all have the same timestamp."""
        return len(self.pts) > 1 and bool((self.pts == self.pts[0]).all())

    def presented(self) -> NDArray[np.int64]:
        """Return the timestamps of the displayed frames in ascending order."""
        return np.sort(self.pts[self.shown])


def index_packets(container: InputContainer, stream: VideoStream, budget: TimeBudget) -> PacketIndex:
    """List the packets of a stream without decoding them.

    If the container breaks off, the list ends there and `broken` contains the reason.

    Raises:
        VideoError: There are too many packets, or the time budget is used up.
    """
    columns = array("q")  # five values per packet; lists would take ten times the memory
    packets: list[av.Packet] = []
    count, kept, broken = 0, 0, None
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
            stamps = (_NO_STAMP if stamp is None else stamp for stamp in (packet.pts, packet.dts))
            shown = not packet.is_discard and not _hidden(stream, packet)
            columns.extend((*stamps, packet.is_keyframe, shown, int(packet.duration or 0)))
            kept += packet.size
            if kept <= KEPT_BYTES and count <= KEPT_PACKETS:
                packets.append(packet)
            else:
                packets.clear()
    except av.FFmpegError as error:
        broken = str(error)
    table = np.array(columns, dtype=np.int64).reshape(-1, 5)
    return _close(table, packets if len(packets) == len(table) else None, broken, container, stream)


def check_packets(count: int, path: Path) -> None:
    """Raise VideoError if a stream has too many packets."""
    if count > MAX_PACKETS:
        found = f"a stream of at least {count:,} packets"
        raise VideoError(path, f"contains {found}; the maximum is {MAX_PACKETS:,}, nine hours at 60 frames per second")


def _close(
    table: NDArray[np.int64],
    packets: list[av.Packet] | None,
    broken: str | None,
    container: InputContainer,
    stream: VideoStream,
) -> PacketIndex:
    pts, dts, keyframe, shown, lengths = table.T
    shown = shown.astype(bool)
    known = (pts != _NO_STAMP) & (dts != _NO_STAMP)
    # True if the timestamps show that a frame is displayed in another order than it is decoded.
    reordered = len(np.unique(np.where(known, pts - dts, _NO_STAMP))) > 1
    if (pts == _NO_STAMP).any():
        pts = pts[:0]
    last = int(np.argmax(np.where(shown, pts, pts.min()))) if len(pts) and shown.any() else -1
    assert stream.time_base is not None, "FFmpeg gives every demuxed stream a time base"
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    # As in OpenCV if the container lists no frames: computed from the duration of the file, including the audio.
    seconds = (
        container.duration / av.time_base if container.duration else float(stream.duration or 0) * stream.time_base
    )
    decoder = stream.codec_context
    return PacketIndex(
        pts=pts,
        keyframe=keyframe.astype(bool),
        shown=shown,
        ordered=reordered or not decoder.has_b_frames,
        # The encoder declares that it packs two frames into a packet, as DivX and Xvid do.
        packed=decoder.name == "mpeg4" and bool(_PACKED.search(decoder.extradata or b"")),
        time_base=stream.time_base,
        rate=rate,
        stated=stream.frames or int(seconds * rate + 0.5) or int(shown.sum()),
        last_length=int(lengths[last]) if len(lengths) else 0,
        broken=broken,
        packets=packets,
    )


@dataclass
class DecodingRun:
    """Packets that are decoded consecutively, starting with a keyframe. The decoder is flushed between runs.

    Attributes:
        numbers: Indices of the packets, in decoding order.
        wanted: Indices of the packets whose frames are selected. The decoder skips other frames that no frame depends
            on.
    """

    numbers: list[int]
    wanted: set[int]


def plan_runs(index: PacketIndex, wanted: Collection[int]) -> list[DecodingRun]:
    """Select the packets to decode for frames by their timestamps, which are valid, ordered, and in the index."""
    numbers = np.flatnonzero(np.isin(index.pts, np.fromiter(wanted, dtype=np.int64)) & index.shown)
    keyframes = np.flatnonzero(index.keyframe)
    segments: list[list[int]] = []
    for number in numbers.tolist():
        start = _start_of(index, keyframes, number)
        while segments and start <= segments[-1][1]:
            start = min(start, segments.pop()[0])
        segments.append([start, number])
    chosen = set(numbers.tolist())
    return [DecodingRun(_needed(index, start, end, chosen), chosen) for start, end in segments]


def _start_of(index: PacketIndex, keyframes: NDArray[np.int64], number: int) -> int:
    """Return the keyframe to decode a frame from, the previous one for frames displayed before theirs (open GOP)."""
    for keyframe in keyframes[: np.searchsorted(keyframes, number, side="right")][::-1].tolist():
        if index.pts[keyframe] <= index.pts[number]:
            return int(keyframe)
    return 0


def _needed(index: PacketIndex, start: int, end: int, chosen: set[int]) -> list[int]:
    """Return the packets from `start` to `end` without those displayed before the run's own keyframe."""
    leading = index.keyframe[start] & (index.pts[start : end + 1] < index.pts[start])
    return [n for n in range(start, end + 1) if n in chosen or not leading[n - start]]


def _hidden(stream: VideoStream, packet: av.Packet) -> bool:
    """Return whether a VP8 packet is an alternate reference, which is never displayed (`show_frame`, RFC 6386, 9.1)."""
    return stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10
