"""Display times of the frames of a file, and a check that the file is complete."""

from __future__ import annotations

from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvr_lightning.media.container import TimeBudget, open_media, packets_of
from tvr_lightning.media.packets import PacketIndex

# A container may declare slightly more than its last frame: audio that ends later, or a rounded frame duration.
_TOLERATED_SECONDS = 0.5


@dataclass
class Timeline:
    """Display times of the n frames of a file.

    Attributes:
        times: Seconds from the first frame, (n,), ascending.
        duration: Seconds from the first frame to the end of the last.
        stamps: Timestamps (n,) that identify decoded frames, or None if only their order does.
    """

    times: NDArray[np.float64]
    duration: float
    stamps: NDArray[np.int64] | None


def packet_timeline(index: PacketIndex) -> Timeline:
    """Return the timeline of the packets, or an evenly spaced one if timestamps are missing or repeated."""
    if index.timed:
        stamps = index.presented()
        return timeline_of(stamps, index, stamps if index.ordered and not index.packed else None)
    return even_timeline(int(index.shown.sum()), index)


def even_timeline(count: int, index: PacketIndex) -> Timeline:
    """Return the timeline of `count` consecutive frames at the rate that the container declares."""
    step = 1 / index.rate / index.time_base
    return timeline_of(np.round(np.arange(count) * float(step)).astype(np.int64), index, None)


def timeline_of(stamps: NDArray[np.int64], index: PacketIndex, known: NDArray[np.int64] | None) -> Timeline:
    """Return the timeline of frames with timestamps (n,); without a declared last duration, the median is used."""
    times = (stamps - stamps[0]) * float(index.time_base)
    gap = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    last = index.last_length * float(index.time_base) or gap
    return Timeline(times, float(times[-1]) + last, known)


def cut_short(container: InputContainer, stream: VideoStream, index: PacketIndex, budget: TimeBudget) -> str | None:
    """Return the reason why the stream is shorter than its container declares, or None.

    A header that only declares too much is not an error, since every packet that it lists exists. Errors are a
    truncated or missing packet and, in containers that do not list packets, a declared end that no stream reaches.
    """
    end = packet_timeline(index).duration
    if index.broken:
        return f"ends early at {end:.2f} s ({index.broken})"
    promised = float(stream.duration * index.time_base) if stream.duration else (container.duration or 0) / av.time_base
    if "matroska" in container.format.name:  # its duration is the time of the end, regardless of the start time
        promised -= (container.start_time or 0) / av.time_base
    if promised - end <= _TOLERATED_SECONDS:
        return None
    missing = stream.frames > len(index.shown)
    if missing or (stream.frames == 0 and _last_seen(budget) < promised - _TOLERATED_SECONDS):
        return f"ends early at {end:.2f} s of {promised:.2f} s (packets are missing)"
    return None


def _last_seen(budget: TimeBudget) -> float:
    """Return the end of the last packet of any stream, in seconds from the start of the container."""
    last = 0.0
    with open_media(budget.path) as container:
        began = (container.start_time or 0) / av.time_base
        for packet in packets_of(container):
            budget.check()
            if packet.pts is not None and packet.time_base is not None:
                last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base) - began)
    return last
