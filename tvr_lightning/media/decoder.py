"""Opening and decoding of video files (selected packets or all), and conversion of frames to images."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from PIL import Image

from tvr_lightning.media.container import (
    MAX_ELONGATION,
    MAX_PIXELS,
    TimeBudget,
    VideoError,
    declared_size,
    open_media,
    packets_of,
    words_of,
)
from tvr_lightning.media.orientation import orientation_of, upright
from tvr_lightning.media.packets import DecodingRun, PacketIndex

_LARGEST = f"the maximum is {MAX_PIXELS:,} pixels, 8192 x 4352"


@contextmanager
def open_video(path: Path, threads: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its first video stream that is not a cover image, and do not conceal decoding errors.

    Raises:
        VideoError: The file is missing or empty, cannot be opened, has no video stream of a known codec, or has frames
            larger than `MAX_PIXELS`.
    """
    with open_media(path) as container:
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise VideoError(path, "has no video stream" + (", only audio" if container.streams.audio else ""))
        stream = streams[0]
        if stream.codec_context is None:
            raise VideoError(path, "its video codec is unknown, or its header is damaged")
        stream.codec_context.thread_count = threads
        stream.codec_context.thread_type = "AUTO" if threads > 1 else "NONE"
        stream.codec_context.options = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
        # FFmpeg discards the frame size if it exceeds the limit.
        width, height = stream.codec_context.width, stream.codec_context.height
        if not width:
            width, height = declared_size(path, stream.index)
        if width * height > MAX_PIXELS:
            raise VideoError(path, f"its frames have {width:,} x {height:,} pixels; {_LARGEST}")
        yield container, stream


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
        return upright(image, orientation_of(frame))


def check_shape(path: Path, frame: VideoFrame) -> None:
    """Raise VideoError if one side of a frame is much longer than the other."""
    if max(frame.width, frame.height) > MAX_ELONGATION * min(frame.width, frame.height):
        found = f"its frames have {frame.width:,} x {frame.height:,} pixels"
        raise VideoError(path, f"{found}; one side may be at most {MAX_ELONGATION} times the other")


def frames_of_runs(
    stream: VideoStream, index: PacketIndex, runs: list[DecodingRun], budget: TimeBudget
) -> Generator[tuple[int, VideoFrame], None, None]:
    """Decode runs of packets one after another, with a fresh decoder state for each.

    Yields:
        The index of the run and a frame, for every decoded frame. If `index` keeps no packets, the file is read again.

    Raises:
        av.FFmpegError: A packet cannot be decoded.
        VideoError: The time budget is used up, or the file changes while it is read.
    """
    decoder = stream.codec_context
    with closing(_chosen_packets(index, runs, budget)) as packets:
        for number, run in enumerate(runs):
            for place in run.numbers:
                packet = next(packets, None)
                if packet is None:
                    raise VideoError(budget.path, "became shorter while it was read")
                decoder.skip_frame = "DEFAULT" if place in run.wanted else "NONREF"
                for frame in decoder.decode(packet):
                    with budget.paused():
                        yield number, frame
            for frame in decoder.decode(None):
                with budget.paused():
                    yield number, frame
            decoder.flush_buffers()


def _chosen_packets(
    index: PacketIndex, runs: list[DecodingRun], budget: TimeBudget
) -> Generator[av.Packet, None, None]:
    """Yield the packets of the runs in order, from memory or by reading the file again."""
    if index.packets is not None:
        for number in (number for run in runs for number in run.numbers):
            budget.check()
            yield index.packets[number]
        return
    chosen = {number for run in runs for number in run.numbers}
    with open_video(budget.path, threads=1) as (container, stream):
        listed = (packet for packet in packets_of(container, stream) if packet.size)
        for number, packet in enumerate(listed):
            budget.check()
            if number in chosen:
                yield packet


def decoded_frames(path: Path, threads: int, budget: TimeBudget) -> Generator[VideoFrame, None, None]:
    """Yield every frame of a file in display order."""
    with open_video(path, threads) as (container, stream):
        yield from frames_in_order(stream, packets_of(container, stream), budget)


def frames_in_order(
    stream: VideoStream, packets: Iterable[av.Packet | None], budget: TimeBudget
) -> Generator[VideoFrame, None, None]:
    """Yield every frame decoded from the packets of an opened stream, in display order.

    Args:
        stream: Stream from which nothing has been decoded.
        packets: All packets of the stream, followed by an empty packet or None.
        budget: Time budget.

    Raises:
        VideoError: A frame cannot be decoded, or the time budget is used up.
    """
    path, time = budget.path, None
    try:
        for packet in packets:
            budget.check()
            for frame in stream.codec_context.decode(packet):
                if frame.is_corrupt:
                    raise VideoError(path, f"the frame at {frame.time} s is damaged")
                time = frame.time
                with budget.paused():
                    yield frame
    except av.FFmpegError as error:
        where = "" if time is None else f" past {time:.2f} s"
        # If FFmpeg rejects the size of a frame, the width is 0.
        reason = words_of(error) if stream.codec_context.width else f"it is damaged or too large: {_LARGEST}"
        raise VideoError(path, f"cannot be decoded{where} ({reason})") from error
