"""Which files an index covers: the videos below its roots, and nothing that leads out of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvr_lightning.media.opening import VIDEO_SUFFIXES
from tvr_lightning.search.errors import SearchError


@dataclass(frozen=True)
class VideoFile:
    """A file as it was when it was found.

    Attributes:
        path: absolute, symbolic links resolved.
        size: bytes.
        modified: nanoseconds since 1970.
    """

    path: Path
    size: int
    modified: int

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits that stand for the path; what addresses hold in its place."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]

    @property
    def key(self) -> int:
        """A positive 63-bit number that stands for this state of this file; a changed file has another one."""
        state = os.fsencode(self.path) + f"|{self.size}|{self.modified}".encode()
        return int.from_bytes(hashlib.sha256(state).digest()[:8], "big") >> 1

    def span_key(self, place: int) -> int:
        """Return a positive 63-bit number that stands for a segment of this state of this file, by its place."""
        return int.from_bytes(hashlib.sha256(f"{self.key}|{place}".encode()).digest()[:8], "big") >> 1


@dataclass
class FolderScan:
    """What a walk over the roots gave.

    Attributes:
        files: videos, each once, in the order of their paths.
        problems: "path: reason" of folders that cannot be read and links that lead out.
        unread: folders that cannot be read; nothing is known about what is below them.
    """

    files: list[VideoFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)


def inside(path: Path, roots: Iterable[Path]) -> bool:
    """Whether a path, all its symbolic links followed, is one of the roots or lies below one."""
    resolved = Path(os.path.realpath(path))
    return any(resolved == root or root in resolved.parents for root in roots)


def resolve_roots(paths: Sequence[str | Path]) -> list[Path]:
    """Return files and folders as absolute paths without symbolic links.

    Raises:
        SearchError: none is given, or one is not there.
    """
    if not paths:
        raise SearchError("No videos are given. Name files or folders to index.")
    for path in paths:
        if not Path(path).exists():
            raise SearchError(f"{path}: no such file or folder")
    return list(dict.fromkeys(Path(os.path.realpath(path)) for path in paths))


def find_videos(roots: Sequence[Path]) -> FolderScan:
    """Walk over the roots and list the videos; what cannot be read is named and left out.

    Links to files are followed where they stay inside the roots; linked folders are not entered.

    Args:
        roots: files and folders, resolved.
    """
    found = FolderScan()
    files: dict[Path, VideoFile] = {}

    def cannot_read(error: OSError) -> None:
        found.problems.append(f"{error.filename}: {error.strerror}")
        found.unread.append(Path(error.filename))

    def add(path: Path) -> None:
        if not inside(path, roots):
            found.problems.append(f"{path}: a symbolic link to a file outside the indexed folders")
            return
        try:
            state = path.stat()
        except OSError as error:
            cannot_read(error)
            return
        resolved = Path(os.path.realpath(path))
        files[resolved] = VideoFile(resolved, state.st_size, state.st_mtime_ns)

    for root in roots:
        if root.is_file():
            add(root)
            continue
        for folder, _, names in os.walk(root, onerror=cannot_read):
            for name in names:
                if Path(name).suffix.lower() in VIDEO_SUFFIXES:
                    add(Path(folder) / name)
    found.files = [files[path] for path in sorted(files)]
    return found
