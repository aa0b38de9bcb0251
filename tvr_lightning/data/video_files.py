"""Search for the video files of a dataset by the names in its annotation files."""

from __future__ import annotations

import os.path
from dataclasses import dataclass, field
from pathlib import Path

from tvr_lightning.data.records import malformed
from tvr_lightning.media.opening import VIDEO_SUFFIXES


def path_below(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder`.

    Raises:
        AnnotationError: The name, which comes from an annotation file, leads out of the folder.
    """
    path = folder / name
    if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        raise malformed(folder, name, "the name leads out of the folder", "use annotation files from their source")
    return path


@dataclass
class VideoFiles:
    """Files of one folder by name; the folder is listed once.

    A file is found by its exact name, or as the only video with the same stem, because copies of datasets are often
    re-encoded into another container. Subtitles, playlists and other files are ignored.

    Attributes:
        folder: Folder of the files.
        suffix: Suffix of the files, with its dot, if annotation files omit it; empty if names in the annotation files
            include it.
    """

    folder: Path
    suffix: str = ""
    _names: set[str] | None = None
    _found: set[str] = field(default_factory=set)
    _stems: dict[str, list[str]] = field(default_factory=dict)

    def find(self, name: str) -> Path:
        """Return the path of the video called `name`, or its expected path if there is none.

        Raises:
            AnnotationError: Several files have the same stem and none has the exact name, or the name leads out of the
                folder.
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
        """Return the videos of the folder that were not found by name so far."""
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
