"""Which container a file is, told by its first bytes.

FFmpeg also opens playlists (HLS, DASH, concat) whatever they are called, and follows them to other files and hosts. A
clip that a stranger sends, or a file that pretends to be a video, must not decide what is read.
"""

from __future__ import annotations

from pathlib import Path

from tvr_lightning.data.video import VideoError

HEAD = 512
_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"uuid", b"styp"}
_STARTS = {
    "matroska": b"\x1a\x45\xdf\xa3",
    "ogg": b"OggS",
    "flv": b"FLV",
    "asf": b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",
    "mpeg": b"\x00\x00\x01\xba",
    "mpegvideo": b"\x00\x00\x01\xb3",
}
_SYNC = 0x47  # begins each packet of an MPEG transport stream
_PACKETS = ((0, 188), (4, 192))  # offset and length; cameras put four bytes before each


def container_of(head: bytes) -> str | None:
    """Return a container's name by the first `HEAD` bytes of a file; None for anything else."""
    if head[4:8] in _BOXES:
        return "mp4"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    for offset, length in _PACKETS:
        if len(head) > offset + length and head[offset] == head[offset + length] == _SYNC:
            return "mpegts"
    return next((name for name, start in _STARTS.items() if head.startswith(start)), None)


def require_container(path: Path) -> None:
    """Check that a file is a video by its first bytes.

    Raises:
        VideoError: it is none; nothing of it was decoded.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(HEAD)
    if not head:
        raise VideoError(path, "is empty")
    if container_of(head) is None:
        raise VideoError(path, "is no video by its first bytes (mp4, mov, mkv, webm, avi, ogg, flv, wmv, mpeg or ts)")
