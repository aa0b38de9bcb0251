"""Names of video files without their endings."""

from __future__ import annotations

from tvr_lightning.media.opening import VIDEO_SUFFIXES


def stem(name: str) -> str:
    """Return a file's name without its ending, if that is one of videos or a bare dot: ids may hold dots themselves."""
    head, dot, tail = name.rpartition(".")
    return head if dot and (not tail or f".{tail.lower()}" in VIDEO_SUFFIXES) else name


def is_video(name: str) -> bool:
    """Whether a file's ending is one of videos."""
    return f".{name.rpartition('.')[2].lower()}" in VIDEO_SUFFIXES
