"""Search for the video files of a dataset by the names in its annotation files."""

import os.path
from pathlib import Path

from tvr_lightning.data.records import malformed
from tvr_lightning.media.container import VIDEO_SUFFIXES


def stem(name: str) -> str:
    """Return a file name without its suffix if that is a video suffix or only a dot, since IDs may contain dots."""
    head, dot, tail = name.rpartition(".")
    return head if dot and (not tail or is_video(name)) else name


def is_video(name: str) -> bool:
    """Return whether a file has a video suffix."""
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def path_below(folder: Path, name: str) -> Path:
    """Return the path of `name`, which comes from an annotation file and must not lead out of `folder`."""
    path = folder / name
    if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        raise malformed(folder, name, "the name leads out of the folder", "use annotation files from their source")
    return path


class VideoFiles:
    """Files by their names in a folder, or relative to it; every folder is listed once.

    A file is found by its exact name, or as the only video with the same stem, because copies of datasets are often
    re-encoded into another container. Subtitles, playlists and other files are ignored.
    Names in the annotation files omit `suffix`, a suffix with its dot; if it is empty, they include theirs.
    `unused` are the videos of the listed folders that were not found by name so far.
    """

    def __init__(self, root: Path, suffix: str = "") -> None:
        self.root = root
        self.suffix = suffix
        self.unused: set[Path] = set()
        self._files: set[Path] = set()
        self._by_stem: dict[Path, dict[str, list[Path]]] = {}

    def find(self, name: str) -> Path:
        """Return the path of the video called `name`, or its expected path if there is none."""
        expected = path_below(self.root, name + self.suffix)
        folder = expected.parent
        found = [expected]
        if folder not in self._by_stem:
            files = sorted(folder.iterdir()) if folder.is_dir() else []
            self._files.update(files)
            self.unused.update(file for file in files if is_video(file.name))
            self._by_stem[folder] = {}
            for file in files:
                if is_video(file.name) or "." not in file.name:
                    self._by_stem[folder].setdefault(stem(file.name), []).append(file)
        if expected not in self._files:
            base = name.rpartition("/")[2]
            stems = [base] if self.suffix else [base, base.rpartition(".")[0]]
            found = next((self._by_stem[folder][stem] for stem in stems if stem in self._by_stem[folder]), found)
        if len(found) > 1:
            message = f"several files match: {', '.join(file.name for file in found)}"
            raise malformed(folder, name, message, "keep only one of them")
        self.unused.discard(found[0])
        return found[0]
