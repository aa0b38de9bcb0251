"""The packets of a video stream: when each is shown, and which must be decoded to see some of its frames.

Compressed frames lean on earlier ones, back to a keyframe. Seeking to every wanted frame decodes the same stretch again
and again, since keyframes are often eight seconds apart while frames are wanted every second; decoding straight through
wastes whole stretches where they are closer. Reading all packets first is cheap (no picture is decoded) and gives both
exactly: each stretch from a keyframe to the last wanted frame behind it is decoded once, and the decoder is told which
pictures in it nobody wants, so that it skips those that no other picture refers to.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvr_lightning.media.opening import MAX_PACKETS, Allowance, VideoError, packets_of

# Above these the packets are not kept between listing and decoding, but read again.
KEPT_BYTES = 64 * 2**20
KEPT_PACKETS = 2**16

_PACKED = re.compile(rb"DivX\d+(Build|b)\d+p")  # as FFmpeg's decoder reads it

_NO_STAMP = -(2**63)  # FFmpeg's own mark, which no time stamp has


@dataclass
class PacketIndex:
    """The n packets of a video stream in decoding order.

    Attributes:
        pts: (n,) int64 presentation time stamps in units of `time_base`; empty where the container gives none.
        keyframe: (n,) bool, True where decoding can begin.
        ordered: whether the time stamps tell the order shown; AVI's only count packets in decoding order.
        packed: whether a packet may hold two pictures, as in AVI, so that times of packets are none of pictures.
        shown: (n,) bool, False for pictures that are decoded but not shown (edit lists, alternate references).
        time_base: seconds per unit.
        rate: frames per second by the container, for files whose time stamps tell nothing.
        stated: Number of frames by the container; it can be larger than the number of pictures.
        last_length: length of the last picture in units of `time_base`, 0 where unknown.
        broken: why the stream stopped before its end, or None.
        packets: the packets themselves, or None where they are too many to keep.
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
        """Whether every shown picture has a time stamp of its own."""
        return len(self.pts) > 0 and len(np.unique(self.pts[self.shown])) == int(self.shown.sum()) > 0

    @property
    def stopped(self) -> bool:
        """Whether all pictures, of several, have the same time stamp."""
        return len(self.pts) > 1 and bool((self.pts == self.pts[0]).all())

    def presented(self) -> NDArray[np.int64]:
        """Return the time stamps of the shown pictures, rising."""
        return np.sort(self.pts[self.shown])


@dataclass
class _Columns:
    # Arrays, since lists take ten times the memory.
    pts: array[int] = field(default_factory=lambda: array("q"))
    dts: array[int] = field(default_factory=lambda: array("q"))
    keyframe: bytearray = field(default_factory=bytearray)
    shown: bytearray = field(default_factory=bytearray)
    length: array[int] = field(default_factory=lambda: array("q"))


def index_packets(container: InputContainer, stream: VideoStream, allowance: Allowance) -> PacketIndex:
    """List the packets of a stream without decoding any.

    A container that breaks off is listed up to there, with the reason in `broken`.

    Args:
        container: an opened file.
        stream: one of its streams.
        allowance: the time that the file may take.

    Raises:
        VideoError: there are too many packets, or the time is used up.
    """
    columns, kept, broken = _Columns(), 0, None
    packets: list[av.Packet] = []
    if "mp4" in container.format.name:  # whose header lists every packet
        check_packets(stream.frames, allowance.path)
    try:
        for packet in packets_of(container, stream):
            allowance.check()
            if packet.size == 0:  # the demuxer's mark for its end
                continue
            check_packets(len(columns.pts) + 1, allowance.path)
            if packet.is_corrupt:
                broken = "a packet is truncated"
                break
            columns.pts.append(_NO_STAMP if packet.pts is None else packet.pts)
            columns.dts.append(_NO_STAMP if packet.dts is None else packet.dts)
            columns.keyframe.append(packet.is_keyframe)
            columns.shown.append(not packet.is_discard and not _hidden(stream, packet))
            columns.length.append(int(packet.duration or 0))
            kept += packet.size
            if kept <= KEPT_BYTES and len(columns.pts) <= KEPT_PACKETS:
                packets.append(packet)
            else:
                packets.clear()
    except av.FFmpegError as error:
        broken = str(error)
    return _close(columns, packets if len(packets) == len(columns.pts) else None, broken, container, stream)


def check_packets(count: int, path: Path) -> None:
    """Raise VideoError where a stream has more packets than are read."""
    if count > MAX_PACKETS:
        found = f"a stream of at least {count:,} packets"
        raise VideoError(path, f"contains {found}; the maximum is {MAX_PACKETS:,}, nine hours at 60 frames per second")


def _close(
    columns: _Columns,
    packets: list[av.Packet] | None,
    broken: str | None,
    container: InputContainer,
    stream: VideoStream,
) -> PacketIndex:
    pts = np.array(columns.pts, dtype=np.int64)
    complete = not (pts == _NO_STAMP).any()
    shown = np.array(columns.shown, dtype=bool)
    pts = pts if complete else pts[:0]
    last = int(np.argmax(np.where(shown, pts, pts.min()))) if complete and shown.any() else -1
    assert stream.time_base is not None, "FFmpeg gives every demuxed stream a time base"
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    # As OpenCV counts where the container lists no frames: by the length of the file, sound included.
    seconds = (
        container.duration / av.time_base if container.duration else float(stream.duration or 0) * stream.time_base
    )
    return PacketIndex(
        pts=pts,
        keyframe=np.array(columns.keyframe, dtype=bool),
        shown=shown,
        ordered=_reordered(columns) or not stream.codec_context.has_b_frames,
        packed=_packed(stream),
        time_base=stream.time_base,
        rate=rate,
        stated=stream.frames or int(seconds * rate + 0.5) or int(shown.sum()),
        last_length=columns.length[last] if columns.length else 0,
        broken=broken,
        packets=packets,
    )


def _reordered(columns: _Columns) -> bool:
    """Return whether any picture is shown at another place than it is decoded, by the time stamps."""
    pts, dts = np.array(columns.pts, dtype=np.int64), np.array(columns.dts, dtype=np.int64)
    known = (pts != _NO_STAMP) & (dts != _NO_STAMP)
    return len(np.unique(np.where(known, pts - dts, _NO_STAMP))) > 1


def _packed(stream: VideoStream) -> bool:
    """Return whether the encoder wrote that it packs two pictures into a packet, as DivX does and Xvid after it."""
    return stream.codec_context.name == "mpeg4" and bool(_PACKED.search(stream.codec_context.extradata or b""))


@dataclass
class Run:
    """Packets that are decoded one after another, the first of them a keyframe; the decoder is flushed between runs.

    Attributes:
        numbers: of the packets, in decoding order.
        wanted: those whose pictures are to come out; of the others the decoder skips what no picture refers to.
    """

    numbers: list[int]
    wanted: set[int]


def plan_runs(index: PacketIndex, wanted: Collection[int]) -> list[Run]:
    """Choose the packets to decode so that the pictures with the wanted time stamps come out.

    Args:
        index: an index that is timed and ordered.
        wanted: presentation time stamps, each one of the index's.
    """
    numbers = np.flatnonzero(np.isin(index.pts, np.fromiter(wanted, dtype=np.int64)) & index.shown)
    keyframes = np.flatnonzero(index.keyframe)
    stretches: list[list[int]] = []
    for number in numbers.tolist():
        start = _start_of(index, keyframes, number)
        while stretches and start <= stretches[-1][1]:
            start = min(start, stretches.pop()[0])
        stretches.append([start, number])
    chosen = set(numbers.tolist())
    return [Run(_needed(index, start, end, chosen), chosen) for start, end in stretches]


def _start_of(index: PacketIndex, keyframes: NDArray[np.int64], number: int) -> int:
    """Return the keyframe that a picture can be decoded from.

    Pictures shown before the keyframe that precedes them in decoding order lean on the stretch before it (open group).
    """
    usable = keyframes[(keyframes <= number) & (index.pts[keyframes] <= index.pts[number])]
    return int(usable[-1]) if len(usable) else 0


def _needed(index: PacketIndex, start: int, end: int, chosen: set[int]) -> list[int]:
    """Return the packets from `start` to `end` without those shown before the run's own keyframe.

    They cannot be decoded here, and nothing after it refers to them.
    """
    leading = index.pts < index.pts[start] if index.keyframe[start] else np.zeros(len(index.pts), dtype=bool)
    return [n for n in range(start, end + 1) if n in chosen or not leading[n]]


def _hidden(stream: VideoStream, packet: av.Packet) -> bool:
    """Return whether a VP8 packet is an alternate reference, which is never shown (`show_frame`, RFC 6386, 9.1)."""
    return stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10
