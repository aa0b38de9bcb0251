"""The one place where media files are opened: which containers are read, and how much one file may cost.

FFmpeg also opens playlists (HLS, DASH, concat, SDP) whatever they are called, and follows them to other files and
hosts. A file that a stranger sends, or that pretends to be a video, must not decide what is read; nor may a few
kilobytes that unfold to gigabytes hold up a reader. The bounds lie beyond 8K and beyond nine hours at 60 frames
a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import av
from av.container import InputContainer

from tvr_lightning.errors import UserError

VIDEO_SUFFIXES = frozenset(
    {".3g2", ".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"}
    | {".vob", ".webm", ".wmv"}
)
"""Suffixes by which video files are found in folders; a file that is named is opened whatever its suffix."""

# FFmpeg's names: mov stands for mp4, m4v and 3gp too, matroska for webm, asf for wmv, mpeg for vob. None of them leads
# to another file. The second line are streams without a container, the third sound alone.
_CONTAINERS = "mov,matroska,avi,ogg,flv,asf,mpeg,mpegts,mxf,rm,dv,nut,gif,mpegvideo,m4v,h264,hevc,ivf,wav,mp3,flac,aac"

MAX_PIXELS = 8192 * 4352
"""Largest picture: that of level 6.2 of H.264 and H.265, a little more than 8K (7680 x 4320)."""
MAX_ELONGATION = 100
"""Longest side of a picture by its shortest, since resizing keeps their ratio."""
MAX_PACKETS = 2**21
"""Most packets of a stream that are read."""
MAX_SECONDS = 10**6
"""Longest video, eleven days: some readers take a frame or a sample of every moment."""

READ_SECONDS = "TVR_READ_SECONDS"
_BASE_SECONDS, _SECONDS_PER_MIB = 120, 4

_PLAYLISTS = {
    b"#EXTM3U": "a playlist (HLS, m3u8)",
    b"ffconcat": "a list of files to concatenate (ffconcat)",
    b"<MPD": "a manifest (DASH)",
    b"<SmoothStreamingMedia": "a manifest (Smooth Streaming)",
    b"v=0": "a session description (SDP)",
    b"[playlist]": "a playlist (PLS)",
}
"""How formats that lead to other files and hosts begin, or the element by which they are known."""

_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}


class MediaError(UserError, ValueError):
    """A file whose picture or sound cannot be read.

    Attributes:
        path: the file.
        reason: why, without the file's name.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class VideoError(MediaError):
    """A file that holds no usable video, or breaks off before the frames that were asked for."""


class Allowance:
    """The CPU time that decoding one file may take: two minutes and four seconds per MiB, or TVR_READ_SECONDS.

    Honest files take a small part of it. It is CPU time, so that a busy machine changes nothing. Time spent on frames
    that have been decoded does not count (`paused`).

    Attributes:
        path: the file.
        seconds: how many.

    Args:
        path: the file.
        threads: decoding threads; the time of a single one is counted for the calling thread alone.

    Raises:
        UserError: the environment's TVR_READ_SECONDS is no number above zero.
    """

    def __init__(self, path: Path, threads: int = 1) -> None:
        self.path = path
        self.seconds = _allowed_seconds(path)
        self._clock = time.thread_time if threads == 1 else time.process_time
        self._end = self._clock() + self.seconds

    def check(self) -> None:
        """Raise VideoError where the time is used up."""
        if self._clock() > self._end:
            raise VideoError(self.path, "decoding it " + _too_slow(self.seconds, "CPU time"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent inside."""
        begun = self._clock()
        try:
            yield
        finally:
            self._end += self._clock() - begun


def _allowed_seconds(path: Path) -> float:
    given = os.environ.get(READ_SECONDS)
    if given is None:
        return _BASE_SECONDS + _SECONDS_PER_MIB * (path.stat().st_size / 2**20 if path.is_file() else 0)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"The environment variable {READ_SECONDS} is {given!r}; it must be a number of seconds above 0")
    return seconds


def _too_slow(seconds: float, kind: str) -> str:
    return f"took more than {seconds:g} s of {kind}; to allow more, set the environment variable {READ_SECONDS}"


def open_media(path: Path) -> InputContainer:
    """Open a media file, and no other one that it may point at.

    Args:
        path: the file; what it is, its bytes decide and not its name.

    Returns:
        The container, to be closed.

    Raises:
        VideoError: the file is missing or empty, cannot be opened in time, or is none of the containers that are read.
    """
    if not path.is_file():
        raise VideoError(path, "there is no such file")
    if path.stat().st_size == 0:
        raise VideoError(path, "the file is empty (0 bytes)")
    seconds, began = _allowed_seconds(path), time.monotonic()
    try:
        return _open(path, {"max_pixels": str(MAX_PIXELS)}, seconds)
    except av.FFmpegError as error:
        # Interrupted early, FFmpeg sometimes calls the data invalid.
        if isinstance(error, av.error.ExitError) or time.monotonic() - began > seconds:
            raise VideoError(path, f"opening it {_too_slow(seconds, 'time')}") from error
        reason = words_of(error)
        if isinstance(error, av.error.ArgumentError):  # a container that is not on the list
            reason = f"it is damaged, or not one of the supported containers: {_CONTAINERS.replace(',', ', ')}"
        raise VideoError(path, f"cannot be opened as video ({_leads_elsewhere(path) or reason})") from error


def _leads_elsewhere(path: Path) -> str | None:
    """Say that a refused file is of a format which names other files, and of which one; None where it is of none."""
    with path.open("rb") as file:
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    for mark, name in _PLAYLISTS.items():
        if mark in head[:2048] if mark.startswith(b"<") else head.startswith(mark):
            return f"it is {name}, which names other files; use those instead"
    return None


def _open(path: Path, options: dict[str, str], seconds: float) -> InputContainer:
    # "file:", since FFmpeg takes what stands before a colon in a name for a protocol. It decodes a few frames to learn
    # what is in the file, and asks between them whether the time is up.
    return av.open(f"file:{path}", metadata_errors="replace", options=_OPTIONS | options, timeout=(seconds, None))


def declared_size(path: Path, stream: int) -> tuple[int, int]:
    """Return the width and height that a container states of a stream, without decoding any; zeros where it does not.

    Args:
        path: a file that `open_media` opened.
        stream: position of the stream.
    """
    with _open(path, {"codec_whitelist": "none"}, _allowed_seconds(path)) as container:
        context = container.streams[stream].codec_context
        return (context.width, context.height) if isinstance(context, av.VideoCodecContext) else (0, 0)


def packets_of(container: InputContainer, *streams: av.VideoStream | av.AudioStream) -> Iterator[av.Packet]:
    """Yield the packets of some streams, all by default, and an empty one at the end of each.

    Raises:
        av.FFmpegError: the container breaks off.
    """
    # Transport streams may bring further streams while they are read. PyAV looks for those, too, when it marks the ends
    # of the streams that it knows, after all of these.
    with suppress(IndexError):
        yield from container.demux(*streams)


def words_of(error: Exception) -> str:
    """Return FFmpeg's words for an error, without the number and the file."""
    return getattr(error, "strerror", None) or str(error)
