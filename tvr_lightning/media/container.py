"""The only module that opens media files: supported containers, and limits on the cost of a file.

FFmpeg also opens playlists (HLS, DASH, concat, SDP) regardless of their name and follows them to other files and hosts.
A file from an untrusted user, or one that pretends to be a video, must not decide what is read, and a few kilobytes
that expand to gigabytes must not block a reader. The limits are above 8K and above nine hours at 60 frames per second.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream

from tvr_lightning.errors import UserError

VIDEO_SUFFIXES = frozenset(
    {".3g2", ".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"}
    | {".vob", ".webm", ".wmv"}
)
"""Suffixes of the video files to search for in folders. A file that is named explicitly can have any suffix."""

# FFmpeg's names: mov includes mp4, m4v, and 3gp; matroska includes webm; asf includes wmv; mpeg includes vob. None of
# them references other files. Streams without a container and audio files are included.
_CONTAINERS = "mov,matroska,avi,ogg,flv,asf,mpeg,mpegts,mxf,rm,dv,nut,gif,mpegvideo,m4v,h264,hevc,ivf,wav,mp3,flac,aac"

MAX_PIXELS = 8192 * 4352  # of a frame: level 6.2 of H.264 and H.265, slightly more than 8K (7680 x 4320)
MAX_PACKETS = 2**21  # of a stream: nine hours at 60 frames per second
MAX_SECONDS = 10**6  # of a video: eleven days, since some readers process a frame or a sample for every moment
READ_SECONDS = "TVR_READ_SECONDS"


class MediaError(UserError):
    """A file whose video, image, or audio cannot be read, for a reason given without the file name."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class VideoError(MediaError):
    """A file that contains no usable video or breaks off before the requested frames."""


class TimeBudget:
    """CPU time budget for decoding one file: two minutes plus four seconds per MiB, or TVR_READ_SECONDS.

    Regular files need only a small part of it. CPU time does not depend on the load of the machine. Time spent on
    decoded frames does not count (`paused`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = _allowed_seconds(path)
        self._end = time.thread_time() + self.seconds

    def check(self) -> None:
        """Raise VideoError if the time budget is used up."""
        if time.thread_time() > self._end:
            raise VideoError(self.path, "decoding it " + _too_slow(self.seconds, "CPU time"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent inside the context."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._end += time.thread_time() - begun


def _allowed_seconds(path: Path) -> float:
    given = os.environ.get(READ_SECONDS)
    if given is None:
        return 120 + 4 * (path.stat().st_size / 2**20 if path.is_file() else 0)
    with suppress(ValueError):
        if float(given) > 0:
            return float(given)
    raise UserError(f"The environment variable {READ_SECONDS} is {given!r}; it must be a number of seconds above 0")


def _too_slow(seconds: float, kind: str) -> str:
    return f"took more than {seconds:g} s of {kind}; to allow more, set the environment variable {READ_SECONDS}"


def open_media(path: Path) -> InputContainer:
    """Open a media file, in a format given by its content, without following references to other files."""
    if not path.is_file():
        raise VideoError(path, "there is no such file")
    if path.stat().st_size == 0:
        raise VideoError(path, "the file is empty (0 bytes)")
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file", "max_pixels": str(MAX_PIXELS)}
    seconds = _allowed_seconds(path)
    began = time.monotonic()
    try:
        # With "file:", since FFmpeg treats the text before a colon in a name as a protocol. It decodes a few frames to
        # detect the streams and checks the time limit between them.
        return av.open(f"file:{path}", metadata_errors="replace", options=options, timeout=(seconds, None))
    except av.FFmpegError as error:
        # If FFmpeg is interrupted early, it sometimes reports invalid data.
        if isinstance(error, av.error.ExitError) or time.monotonic() - began > seconds:
            raise VideoError(path, f"opening it {_too_slow(seconds, 'time')}") from error
        reason = error.strerror
        if isinstance(error, av.error.ArgumentError):  # a container that is not in the list
            supported = _CONTAINERS.replace(",", ", ")
            reason = f"it is damaged, a playlist that names other files, or not one of the containers {supported}"
        raise VideoError(path, f"cannot be opened as video ({reason})") from error


@contextmanager
def open_video(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its first video stream that is not a cover image, and do not conceal decoding errors."""
    with open_media(path) as container:
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise VideoError(path, "has no video stream" + (", only audio" if container.streams.audio else ""))
        decoder = streams[0].codec_context
        if decoder is None:
            raise VideoError(path, "its video codec is unknown, or its header is damaged")
        decoder.thread_count, decoder.thread_type = 1, "NONE"  # many files are read in parallel
        decoder.options = {"err_detect": "explode", "max_pixels": str(MAX_PIXELS)}
        yield container, streams[0]


def packets_of(
    container: InputContainer, budget: TimeBudget, *streams: av.VideoStream | av.AudioStream
) -> Iterator["av.Packet[Any]"]:
    """Yield the packets of some streams (default: all), and an empty packet at the end of each stream."""
    count = 0
    # Transport streams can add streams while they are read. After the end of all known streams, PyAV also looks for the
    # added ones.
    with suppress(IndexError):
        for packet in container.demux(*streams):
            budget.check()
            count += packet.size > 0
            if count > MAX_PACKETS:
                limit = f"the maximum is {MAX_PACKETS:,}, nine hours at 60 frames per second"
                raise VideoError(budget.path, f"contains a stream of at least {count:,} packets; {limit}")
            yield packet
