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
    """Files of one folder by name; the folder is listed once.

    A file is found by its exact name, or as the only video with the same stem, because copies of datasets are often
    re-encoded into another container. Subtitles, playlists and other files are ignored.
    Names in the annotation files omit `suffix`, a suffix with its dot; if it is empty, they include theirs.
    """

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self.folder = folder
        self.suffix = suffix
        self._names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        self._unused = {name for name in self._names if is_video(name)}
        self._by_stem: dict[str, list[str]] = {}
        for name in sorted(self._names):
            if is_video(name) or "." not in name:
                self._by_stem.setdefault(stem(name), []).append(name)

    def find(self, name: str) -> Path:
        """Return the path of the video called `name`, or its expected path if there is none."""
        found = [name + self.suffix]
        if found[0] not in self._names:
            stems = [name] if self.suffix else [name, name.rpartition(".")[0]]
            found = next((self._by_stem[stem] for stem in stems if stem in self._by_stem), found)
        if len(found) > 1:
            fix = "keep only one of them"
            raise malformed(self.folder, name, f"several files match: {', '.join(found)}", fix)
        self._unused.discard(found[0])
        return path_below(self.folder, found[0])

    def others(self) -> list[Path]:
        """Return the videos of the folder that were not found by name so far."""
        return [self.folder / name for name in sorted(self._unused)]
