"""Import of a dataset: recognize its layout, convert it, compare it with the protocol, and write the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.importing.layouts import SOURCES, Files, Layout, Reading, Source
from tvr_lightning.data.importing.names import stem
from tvr_lightning.data.importing.videos import ImportFailed, Placed, Way, find_videos, place_videos
from tvr_lightning.data.records import SHOWN, SYNTHETIC_FILE, AnnotationError, Split, SplitName
from tvr_lightning.files import write_whole

DEPTH = 2  # levels of subfolders that are searched for annotations


@dataclass
class Imported:
    """Result of an import.

    Attributes:
        title: Title of the dataset.
        folder: Folder of the imported dataset.
        layout: Recognized layout of the source.
        source: Folder of the source annotations.
        splits: Numbers of videos and texts, by configuration and split.
        differences: Differences from the protocol, one sentence each.
        placed: Result of importing the videos.
        absent: Videos with captions but without a file.
        written: Newly written annotation files.
    """

    title: str
    folder: Path
    layout: Layout
    source: Path
    splits: dict[tuple[str, SplitName], tuple[int, int]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    placed: Placed = field(default_factory=Placed)
    absent: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a summary for the user, one line per item."""
        yield f"{self.title} in the {self.layout.name} layout: {self.source}"
        for (reading, name), (videos, texts) in self.splits.items():
            yield f"  {f'{reading}, ' if reading else ''}{name}: {videos:,} videos, {texts:,} texts"
        yield from (f"Differs from the protocol: {sentence}" for sentence in self.differences)
        if self.placed.unused:
            yield f"Videos without captions, not imported: {_some(self.placed.unused)}"
        if self.absent:
            yield f"Captions without videos: {_some(self.absent)}. Add the videos and import again."
        new = f"{len(self.written)} annotation files and {self.placed.new} videos"
        yield f"Wrote {self.folder}: {new} are new, {self.placed.present} videos were already there"


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)}, {', '.join(names[:SHOWN])}{rest}"


def import_dataset(
    dataset: str,
    held: Path,
    root: Path,
    *,
    layout: str | None = None,
    way: Way = "link",
    progress: bool = True,
) -> Imported:
    """Import a dataset into the expected layout; nothing is deleted or overwritten.

    Args:
        dataset: Folder name of the dataset, a key of `SOURCES`.
        held: Folder with annotations and videos, as files or in archives.
        root: Parent folder of all datasets.
        layout: Name of the layout, if several are possible.
        way: Method of placing videos: "link" or "copy".
        progress: Whether to show progress bars.

    Raises:
        ImportFailed: No layout or several layouts are recognized, a file is truncated, or a different file exists.
        AnnotationError: An annotation file contradicts itself.
    """
    source = SOURCES[dataset]
    target = root.expanduser() / source.kind.directory
    chosen, files, folder = recognise(source, held, layout, skip=target)
    contents = chosen.convert(files) if chosen.convert else {name: path.read_bytes() for name, path in files.items()}
    if (folder / SYNTHETIC_FILE).is_file():
        contents[SYNTHETIC_FILE] = (folder / SYNTHETIC_FILE).read_bytes()
    result = Imported(source.kind.title, target, chosen, folder)
    if chosen.note:
        result.differences.append(chosen.note)
    wanted = {stem(path.name): path.parent for path in _videos_read(source, contents, result)}
    videos = find_videos(held)
    _check_annotations(target, contents)
    # Written after all checks and before the videos, whose import may take long and can be resumed.
    for name, content in contents.items():
        if not (target / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(target / name, content)
            result.written.append(name)
    (target / "videos").mkdir(exist_ok=True)
    result.placed = place_videos(videos, wanted, way, progress)
    listed: dict[Path, set[str]] = {}
    for name, place in wanted.items():
        if place not in listed:
            listed[place] = {stem(path.name) for path in place.iterdir()} if place.is_dir() else set()
        if name not in listed[place]:
            result.absent.append(name)
    return result


def recognise(
    source: Source, held: Path, name: str | None = None, skip: Path | None = None
) -> tuple[Layout, Files, Path]:
    """Return the layout of the annotations in a folder or its subfolders, their files, and their folder.

    Args:
        source: Dataset with its layouts.
        held: Folder to search.
        name: Name of the layout, if several are possible.
        skip: Subfolder to skip, because earlier imports wrote it.

    Raises:
        ImportFailed: No layout or more than one was found.
    """
    title = source.kind.title
    known = {layout.name: layout for layout in source.layouts}
    if not held.is_dir():
        raise ImportFailed(f"{held} is not a folder. Name the folder with the annotations and the videos of {title}.")
    if name is not None and name not in known:
        raise ImportFailed(f"{title} has no layout {name!r}. Available: {', '.join(known)}.")
    folders: list[list[Path]] = [[held]]
    for _ in range(DEPTH):
        below = (path for folder in folders[-1] for path in sorted(folder.iterdir()))
        folders.append([path for path in below if path.is_dir() and path.name != "videos" and path != skip])
    nearest: dict[str, list[str]] = {}
    for level in folders:
        complete: list[tuple[Layout, Files, Path]] = []
        for folder in level:
            names = {path.name: path for path in folder.iterdir() if path.is_file()}
            here = []
            for layout in [known[name]] if name else source.layouts:
                files, missing = layout.find(names)
                if not missing:
                    here.append((layout, files, folder))
                elif len(missing) < len(nearest.get(layout.name, [*missing, ""])):
                    nearest[layout.name] = missing
            complete += [one for one in here if not any(_within(one[1], other[1]) for other in here)]
        if len(complete) > 1:
            several = " and ".join(f"{layout.name} in {folder}" for layout, _, folder in complete)
            raise ImportFailed(
                f"{held} contains several layouts of {title}: {several}. Choose one with --layout or --from."
            )
        if complete:
            return complete[0]
    wanting = "; ".join(f"for {layout} {', '.join(missing)}" for layout, missing in nearest.items())
    raise ImportFailed(
        f"No supported {title} layout found in {held}. Missing files: {wanting}. For supported layouts, see "
        "docs/datasets.md."
    )


def _within(files: Files, others: Files) -> bool:
    return set(files.values()) < set(others.values())


def _videos_read(source: Source, contents: dict[str, bytes], result: Imported) -> Iterator[Path]:
    """Read the converted files, record differences from the protocol, and yield the target paths of the videos."""
    with TemporaryDirectory() as trial:
        folder = Path(trial) / source.kind.directory
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        read: set[Path] = set()
        for reading in source.readings:
            data: TextVideoDataModule = source.kind(root=trial, **reading.options)
            splits: list[SplitName] = ["train", "val", "test"] if data.has_official_validation else ["train", "test"]
            files = {file for name in splits for file in data.required_files(name)}
            if files <= read or not all(file.is_file() for file in files):
                continue
            read |= files
            for name in splits:
                try:
                    split = data.read_split(name)
                except AnnotationError as error:
                    there = [
                        replace(one, file=one.file.replace(str(folder), str(result.source))) for one in error.problems
                    ]
                    raise AnnotationError(there) from error
                _note(reading, split, name, result)
                yield from (result.folder / video.path.relative_to(folder) for video in split.videos)


def _note(reading: Reading, split: Split, name: SplitName, result: Imported) -> None:
    said = ", ".join(str(option) for option in reading.options.values())
    result.splits[said, name] = len(split.videos), len(split.texts)
    expected = reading.counts.get(name)
    if expected is not None and len(split.videos) != expected:
        which = f"{said}, {name}" if said else name
        sentence = f"{which} has {len(split.videos):,} videos, but the protocol has {expected:,}"
        result.differences.append(sentence)


def _check_annotations(target: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        present = target / name
        if present.is_file() and present.read_bytes() != content:
            raise ImportFailed(f"{present} already exists with different content. Move it, or choose another --root.")
