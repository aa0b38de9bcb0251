"""The one place where media files are opened, and which containers are read.

FFmpeg also opens playlists (HLS, DASH, concat, SDP) whatever they are called, and follows them to other files and
hosts. A file that a stranger sends, or that pretends to be a video, must not decide what is read.
"""

from __future__ import annotations

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
_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}


class VideoError(UserError, ValueError):
    """A file that holds no usable video, or breaks off before the frames that were asked for.

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


def open_media(path: Path) -> InputContainer:
    """Open a media file, and no other one that it may point at.

    Args:
        path: the file; what it is, its bytes decide and not its name.

    Returns:
        The container, to be closed.

    Raises:
        VideoError: the file is missing or empty, cannot be opened, or is none of the containers that are read.
    """
    if not path.is_file():
        raise VideoError(path, "there is no such file")
    if path.stat().st_size == 0:
        raise VideoError(path, "the file is empty (0 bytes)")
    try:
        # "file:", since FFmpeg takes what stands before a colon in a name for a protocol.
        return av.open(f"file:{path}", metadata_errors="replace", options=dict(_OPTIONS))
    except av.error.ArgumentError as error:  # how a container that is not on the list is refused
        reason = f"it is a playlist, damaged, or none of the containers that are read: {_CONTAINERS.replace(',', ', ')}"
        raise VideoError(path, f"cannot be opened as video ({reason})") from error
    except av.FFmpegError as error:
        raise VideoError(path, f"cannot be opened as video ({words_of(error)})") from error


def words_of(error: Exception) -> str:
    """Return FFmpeg's words for an error, without the number and the file."""
    return getattr(error, "strerror", None) or str(error)
