"""Finds a dataset's video files in their folder, under the names that annotation files give them."""

from __future__ import annotations

import os.path
from dataclasses import dataclass, field
from pathlib import Path

from tvr_lightning.data.records import malformed
from tvr_lightning.media.opening import VIDEO_SUFFIXES


def path_below(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder`.

    Raises:
        AnnotationError: the name, which comes from an annotation file, leads out of the folder.
    """
    path = folder / name
    if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        raise malformed(folder, name, "the name leads out of the folder", "use annotation files from their source")
    return path


@dataclass
class VideoFiles:
    """Finds the files of one folder by name, listing the folder once.

    A file is found under its exact name, else under the only video of the same stem, since copies of the datasets are
    often re-encoded into another container; subtitles, playlists and other files beside a video are passed over.

    Attributes:
        folder: where the files are.
        suffix: suffix of the dataset's files, with its dot, where annotation files leave it out; empty where the
            names in the annotation files carry their own.
    """

    folder: Path
    suffix: str = ""
    _names: set[str] | None = None
    _found: set[str] = field(default_factory=set)
    _stems: dict[str, list[str]] = field(default_factory=dict)

    def find(self, name: str) -> Path:
        """Return the path of the video called `name`, or the path where it is expected if there is none.

        Raises:
            AnnotationError: several files share the stem and none of them has the exact name, or the name leads out
                of the folder.
        """
        names = self._listing()
        if name + self.suffix in names:
            self._found.add(name + self.suffix)
            return self.folder / (name + self.suffix)
        found = self._stems.get(name, [])
        if not found and not self.suffix:
            found = self._stems.get(name.rpartition(".")[0], [])
        if len(found) > 1:
            fix = "keep only one of them"
            raise malformed(self.folder, name, f"several files match: {', '.join(found)}", fix)
        self._found.update(found)
        return path_below(self.folder, found[0] if found else name + self.suffix)

    def others(self) -> list[Path]:
        """Return the videos of the folder that nobody has found by name so far."""
        return [
            self.folder / name
            for name in sorted(self._listing() - self._found)
            if Path(name).suffix.lower() in VIDEO_SUFFIXES
        ]

    def _listing(self) -> set[str]:
        if self._names is None:
            files = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
            self._names = set(files)
            for file in files:
                stem, dot, suffix = file.rpartition(".")
                if not dot or dot + suffix.lower() in VIDEO_SUFFIXES:
                    self._stems.setdefault(stem or file, []).append(file)
        return self._names
