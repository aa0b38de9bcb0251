"""Video files on disk: the indexed folders, what is in them, and which of them the user named.

Another user may have made an index, so the paths in it are not trusted. `tvr index` remembers what the user named in
the user's state directory, under the random identity of the index.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import filterfalse
from pathlib import Path

from tvr_lightning.files import write_whole
from tvr_lightning.media.container import VIDEO_SUFFIXES
from tvr_lightning.search.errors import SearchError, UnreadableError
from tvr_lightning.search.results import printable


@dataclass(frozen=True)
class VideoFile:
    """State of a file: path (absolute, links resolved), size in bytes, and modification time in nanoseconds."""

    path: Path
    size: int
    modified: int

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits that represent the path; clients use them instead of it."""
        return hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]

    def span_key(self, place: int) -> int:
        """Return a positive 63-bit number that represents a segment of this state of the file."""
        content = os.fsencode(self.path) + f"|{self.size}|{self.modified}|{place}".encode()
        return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def within(path: Path, roots: Set[Path]) -> bool:
    """Return whether a path is one of the roots or in one."""
    return not roots.isdisjoint((path, *path.parents))


def relative(path: Path, roots: Sequence[Path]) -> str:
    """Return a path relative to its indexed folder, so that clients learn nothing else about this machine."""
    root = next((root for root in roots if root in path.parents), path.parent)
    return printable(path.relative_to(root).as_posix())


def resolve_roots(paths: Sequence[str | Path]) -> list[Path]:
    """Return files and folders as absolute paths without symbolic links."""
    if not paths:
        raise SearchError("No videos are given. Name files or folders to index.")
    for path in paths:
        if not Path(path).exists():
            raise SearchError(f"{path}: no such file or folder")
    return list(dict.fromkeys(Path(os.path.realpath(path)) for path in paths))


def find_videos(roots: Sequence[Path]) -> tuple[list[VideoFile], list[str], set[Path]]:
    """List the videos in resolved files and folders, following links to files within them, but no links to folders.

    Returns:
        Videos in the order of their paths, problems as "path: reason", and unreadable folders.
    """
    files: dict[Path, VideoFile] = {}
    problems: list[str] = []
    unread: set[Path] = set()

    def cannot_read(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")
        unread.add(Path(error.filename))

    paths = list(filter(Path.is_file, roots))
    for root in filterfalse(Path.is_file, roots):
        for folder, _, names in os.walk(root, onerror=cannot_read):
            paths += [Path(folder, name) for name in names if Path(name).suffix.lower() in VIDEO_SUFFIXES]
    for path in paths:
        resolved = Path(os.path.realpath(path))
        try:
            if within(resolved, set(roots)):
                state = path.stat()
                files[resolved] = VideoFile(resolved, state.st_size, state.st_mtime_ns)
            else:
                problems.append(f"{path}: a symbolic link to a file outside the indexed folders")
        except OSError as error:
            cannot_read(error)
    return [files[path] for path in sorted(files)], problems, unread


@dataclass
class NamedPaths:
    """Paths of videos and of a captions file that this user named for one index."""

    videos: list[str] = field(default_factory=list)
    captions: str | None = None

    @classmethod
    def load(cls, identity: str) -> NamedPaths:
        """Return the named paths, none for an index from another user or machine."""
        try:
            file = _state_file(identity)
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, RuntimeError):
            return cls()
        except (ValueError, TypeError) as error:
            raise UnreadableError(
                f"{file} is damaged ({error}). Delete it and name the videos again with tvr index."
            ) from error

    def save(self, identity: str) -> list[str]:
        """Remember what the user named; return why that is impossible, if it is."""
        try:
            file = _state_file(identity)
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(file, json.dumps(asdict(self), indent=1).encode())
        except (OSError, RuntimeError) as error:
            return [f"{error}. The named folders are not remembered, so tvr serve will need --videos."]
        return []


def _state_file(identity: str) -> Path:
    """Return the file of an index, whose identity may come from another user."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "tvr_lightning" / "indexes" / (re.sub(r"\W", "", identity) + ".json")
