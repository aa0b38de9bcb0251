"""Opening video files, decoding them (the chosen packets, or all), and making pictures of frames."""

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

from tvr_lightning.media.opening import (
    MAX_PIXELS,
    Allowance,
    VideoError,
    declared_size,
    open_media,
    packets_of,
    words_of,
)
from tvr_lightning.media.packets import PacketIndex, Run

_LARGEST = f"the maximum is {MAX_PIXELS:,} pixels, 8192 x 4352"


@contextmanager
def open_video(path: Path, threads: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its video stream, with decoding errors raised instead of painted over.

    Args:
        path: the file.
        threads: decoding threads.

    Returns:
        A context with the container and its first video stream that is no cover picture.

    Raises:
        VideoError: the file is missing or empty, cannot be opened, has no video stream of a known codec, or pictures
            beyond `MAX_PIXELS`.
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
        # FFmpeg forgets the size of pictures that it was told not to decode.
        width, height = stream.codec_context.width, stream.codec_context.height
        if not width:
            width, height = declared_size(path, stream.index)
        if width * height > MAX_PIXELS:
            raise VideoError(path, f"its frames have {width:,} x {height:,} pixels; {_LARGEST}")
        yield container, stream


class Pictures:
    """Turns decoded frames into pictures; one for a whole clip, since its conversion tables are dear to make."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> Image.Image:
        """Return a frame as a picture of mode RGB.

        Its pixels equal those of PyAV's `to_image`, which is several times slower, with the file's own color matrix and
        range. Conversion runs in this thread, since many workers each with a pool of threads hinder each other.
        Three bytes per pixel, since FFmpeg's conversion to four does not write the last columns of some widths.
        """
        converted = self._reformatter.reformat(frame, format="rgb24", threads=1)
        plane = converted.planes[0]
        size = (converted.width, converted.height)
        return Image.frombytes("RGB", size, plane, "raw", "RGB", plane.line_size, 1)  # type: ignore[arg-type]


def frames_of_runs(
    stream: VideoStream, index: PacketIndex, runs: list[Run], allowance: Allowance
) -> Generator[tuple[int, VideoFrame], None, None]:
    """Decode runs of packets one after another, beginning anew with each.

    Args:
        stream: the opened stream.
        index: its packets; the file is read again where it does not keep them.
        runs: as `plan_runs` gives them.
        allowance: the time that the file may take.

    Yields:
        The number of the run and a frame, for every frame that comes out.

    Raises:
        av.FFmpegError: a packet cannot be decoded.
        VideoError: the time is used up, or the file changes meanwhile.
    """
    decoder = stream.codec_context
    with closing(_chosen_packets(index, runs, allowance)) as packets:
        for number, run in enumerate(runs):
            for place in run.numbers:
                packet = next(packets, None)
                if packet is None:
                    raise VideoError(allowance.path, "became shorter while it was read")
                decoder.skip_frame = "DEFAULT" if place in run.wanted else "NONREF"
                for frame in decoder.decode(packet):
                    with allowance.paused():
                        yield number, frame
            for frame in decoder.decode(None):
                with allowance.paused():
                    yield number, frame
            decoder.flush_buffers()


def _chosen_packets(index: PacketIndex, runs: list[Run], allowance: Allowance) -> Generator[av.Packet, None, None]:
    """Yield the packets of the runs in order, from memory or by reading the file again."""
    if index.packets is not None:
        for number in (number for run in runs for number in run.numbers):
            allowance.check()
            yield index.packets[number]
        return
    chosen = {number for run in runs for number in run.numbers}
    with open_video(allowance.path, threads=1) as (container, stream):
        listed = (packet for packet in packets_of(container, stream) if packet.size)
        for number, packet in enumerate(listed):
            allowance.check()
            if number in chosen:
                yield packet


def decoded_frames(path: Path, threads: int, allowance: Allowance) -> Generator[VideoFrame, None, None]:
    """Yield every frame of a file, in the order shown.

    Raises:
        VideoError: a frame cannot be decoded, or the time is used up.
    """
    with open_video(path, threads) as (container, stream):
        yield from frames_in_order(stream, packets_of(container, stream), allowance)


def frames_in_order(
    stream: VideoStream, packets: Iterable[av.Packet | None], allowance: Allowance
) -> Generator[VideoFrame, None, None]:
    """Yield every frame that comes out of the packets of an opened stream, in the order shown.

    Args:
        stream: of which nothing has been decoded.
        packets: all of it, and an empty one or None behind them.
        allowance: the time that the file may take.

    Raises:
        VideoError: a frame cannot be decoded, or the time is used up.
    """
    path, time = allowance.path, None
    try:
        for packet in packets:
            allowance.check()
            for frame in stream.codec_context.decode(packet):
                if frame.is_corrupt:
                    raise VideoError(path, f"the frame at {frame.time} s is damaged")
                time = frame.time
                with allowance.paused():
                    yield frame
    except av.FFmpegError as error:
        where = "" if time is None else f" past {time:.2f} s"
        # What FFmpeg leaves of the size of a picture that it refuses.
        reason = words_of(error) if stream.codec_context.width else f"it is damaged or too large: {_LARGEST}"
        raise VideoError(path, f"cannot be decoded{where} ({reason})") from error
