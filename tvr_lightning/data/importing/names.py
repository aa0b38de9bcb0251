"""File names of videos without their suffixes."""

from __future__ import annotations

from tvr_lightning.media.opening import VIDEO_SUFFIXES


def stem(name: str) -> str:
    """Return a file name without its suffix if that is a video suffix or only a dot, since IDs may contain dots."""
    head, dot, tail = name.rpartition(".")
    return head if dot and (not tail or f".{tail.lower()}" in VIDEO_SUFFIXES) else name


def is_video(name: str) -> bool:
    """Return whether a file has a video suffix."""
    return f".{name.rpartition('.')[2].lower()}" in VIDEO_SUFFIXES
