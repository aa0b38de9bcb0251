"""When the frames of a file are shown, and whether it holds all that it promises."""

from __future__ import annotations

from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvr_lightning.media.opening import Allowance, open_media, packets_of
from tvr_lightning.media.packets import PacketIndex

# A container may promise a little more than its last frame: sound that ends later, a rounded frame length.
_TOLERATED_SECONDS = 0.5


@dataclass
class Timeline:
    """When the n frames of a file are shown.

    Attributes:
        times: (n,) seconds from the first frame, rising.
        duration: seconds from the first frame to the end of the last.
        stamps: (n,) time stamps by which a decoded frame is known, or None where only its ordinal number tells.
    """

    times: NDArray[np.float64]
    duration: float
    stamps: NDArray[np.int64] | None


def packet_timeline(index: PacketIndex) -> Timeline:
    """Return the timeline that the packets tell, or an even one where their time stamps are missing or repeated."""
    if index.timed:
        stamps = index.presented()
        return timeline_of(stamps, index, stamps if index.ordered and not index.packed else None)
    return even_timeline(int(index.shown.sum()), index)


def even_timeline(count: int, index: PacketIndex) -> Timeline:
    """Return the timeline of `count` frames shown one after another at the rate that the container declares."""
    step = 1 / index.rate / index.time_base
    return timeline_of(np.round(np.arange(count) * float(step)).astype(np.int64), index, None)


def timeline_of(stamps: NDArray[np.int64], index: PacketIndex, known: NDArray[np.int64] | None) -> Timeline:
    """Return the timeline of frames whose time stamps are given.

    Args:
        stamps: (n,) in units of the index's time base, rising.
        index: tells the time base and the length of the last frame.
        known: `stamps` where a decoded frame carries its own, else None.

    Returns:
        The timeline; the last frame lasts as the middle one does where the file does not say.
    """
    times = (stamps - stamps[0]) * float(index.time_base)
    gap = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    last = index.last_length * float(index.time_base) or gap
    return Timeline(times, float(times[-1]) + last, known)


def cut_short(container: InputContainer, stream: VideoStream, index: PacketIndex, allowance: Allowance) -> str | None:
    """Return why the stream holds less than its container says, or None.

    A header that merely says too much is no fault: every packet that it lists is there. What counts is a packet cut off
    or missing, or, in containers that list none, that no stream reaches the promised end.
    """
    end = packet_timeline(index).duration
    if index.broken:
        return f"ends early at {end:.2f} s ({index.broken})"
    promised = float(stream.duration * index.time_base) if stream.duration else (container.duration or 0) / av.time_base
    if "matroska" in container.format.name:  # its duration is the time of the end, wherever the file starts
        promised -= (container.start_time or 0) / av.time_base
    if promised - end <= _TOLERATED_SECONDS:
        return None
    missing = stream.frames > len(index.shown)
    if missing or (stream.frames == 0 and _last_seen(allowance) < promised - _TOLERATED_SECONDS):
        return f"ends early at {end:.2f} s of {promised:.2f} s (packets are missing)"
    return None


def _last_seen(allowance: Allowance) -> float:
    """Return the end in seconds of the last packet of any stream, from the container's beginning."""
    last = 0.0
    with open_media(allowance.path) as container:
        began = (container.start_time or 0) / av.time_base
        for packet in packets_of(container):
            allowance.check()
            if packet.pts is not None and packet.time_base is not None:
                last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base) - began)
    return last
