"""Import of a dataset: recognize its layout, convert it, compare it with the protocol, and write the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tvr_lightning.data.importing.layouts import DATASETS, AnnotationLayout, Files, ImportableDataset
from tvr_lightning.data.importing.videos import ImportedVideos, ImportFailed, Way, find_videos, import_videos
from tvr_lightning.data.records import SYNTHETIC_FILE, AnnotationError, SplitName, abbreviated
from tvr_lightning.data.video_files import stem
from tvr_lightning.files import write_whole

DEPTH = 2  # levels of subfolders that are searched for annotations


@dataclass
class ImportReport:
    """Result of an import.

    Attributes:
        title: Title of the dataset.
        folder: Folder of the imported dataset.
        layout: Recognized layout of the source.
        source: Folder of the source annotations.
        splits: Numbers of videos and texts, by configuration and split.
        differences: Differences from the protocol, one sentence each.
        videos: Result of importing the videos.
        absent: Videos with captions but without a file.
        written: Newly written annotation files.
    """

    title: str
    folder: Path
    layout: AnnotationLayout
    source: Path
    splits: dict[tuple[str, SplitName], tuple[int, int]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    videos: ImportedVideos = field(default_factory=ImportedVideos)
    absent: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a summary for the user, one line per item."""
        yield f"{self.title} in the {self.layout.name} layout: {self.source}"
        for (options, name), (videos, texts) in self.splits.items():
            yield f"  {f'{options}, ' if options else ''}{name}: {videos:,} videos, {texts:,} texts"
        yield from (f"Differs from the protocol: {sentence}" for sentence in self.differences)
        if self.videos.unused:
            yield f"Videos without captions, not imported: {len(self.videos.unused)}, {abbreviated(self.videos.unused)}"
        if self.absent:
            names = f"{len(self.absent)}, {abbreviated(self.absent)}"
            yield f"Captions without videos: {names}. Add the videos and import again."
        new = f"{len(self.written)} annotation files and {self.videos.new} videos"
        yield f"Wrote {self.folder}: {new} are new, {self.videos.present} videos were already there"


def import_dataset(
    dataset: str,
    source: Path,
    root: Path,
    *,
    layout: str | None = None,
    way: Way = "link",
    progress: bool = True,
) -> ImportReport:
    """Import a dataset into the expected layout; nothing is deleted or overwritten.

    Args:
        dataset: Folder name of the dataset, a key of `DATASETS`.
        source: Folder with annotations and videos, as files or in archives.
        root: Parent folder of all datasets.
        layout: Name of the layout, if several are possible.
        way: Method of placing videos: "link" or "copy".
        progress: Whether to show progress bars.

    Raises:
        ImportFailed: No layout or several layouts are recognized, a file is truncated, or a different file exists.
        AnnotationError: An annotation file contradicts itself.
    """
    importable = DATASETS[dataset]
    target = root.expanduser() / importable.kind.directory
    chosen, files, folder = find_layout(importable, source, layout, skip=target)
    contents = chosen.convert(files) if chosen.convert else {name: path.read_bytes() for name, path in files.items()}
    if (folder / SYNTHETIC_FILE).is_file():
        contents[SYNTHETIC_FILE] = (folder / SYNTHETIC_FILE).read_bytes()
    report = ImportReport(importable.kind.title, target, chosen, folder)
    if chosen.note:
        report.differences.append(chosen.note)
    folders = {stem(path.name): path.parent for path in _read_videos(importable, contents, report)}
    loose, archives = find_videos(source)
    for name, content in contents.items():
        file = target / name
        if file.is_file() and file.read_bytes() != content:
            raise ImportFailed(f"{file} already exists with different content. Move it, or choose another --root.")
    # Written after all checks and before the videos, whose import may take long and can be resumed.
    for name, content in contents.items():
        if not (target / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(target / name, content)
            report.written.append(name)
    (target / "videos").mkdir(exist_ok=True)
    report.videos = import_videos(loose, archives, folders, way, progress)
    existing = filter(Path.is_dir, set(folders.values()))
    present = {(parent, stem(path.name)) for parent in existing for path in parent.iterdir() if path.exists()}
    report.absent = [name for name, parent in folders.items() if (parent, name) not in present]
    return report


def find_layout(
    dataset: ImportableDataset, source: Path, name: str | None = None, skip: Path | None = None
) -> tuple[AnnotationLayout, Files, Path]:
    """Return the layout of the annotations in a folder or its subfolders, their files, and their folder.

    Args:
        dataset: Dataset with its layouts.
        source: Folder to search.
        name: Name of the layout, if several are possible.
        skip: Subfolder to skip, because earlier imports wrote it.

    Raises:
        ImportFailed: No layout or more than one was found.
    """
    title = dataset.kind.title
    layouts = [layout for layout in dataset.layouts if name in (None, layout.name)]
    if not source.is_dir():
        raise ImportFailed(f"{source} is not a folder. Name the folder with the annotations and the videos of {title}.")
    if not layouts:
        available = ", ".join(dict.fromkeys(layout.name for layout in dataset.layouts))
        raise ImportFailed(f"{title} has no layout {name!r}. Available: {available}.")
    nearest: dict[str, list[str]] = {}
    level = [source]
    for _ in range(DEPTH + 1):
        complete: list[tuple[AnnotationLayout, Files, Path]] = []
        for folder, layout in itertools.product(level, layouts):
            files, missing = layout.find(folder)
            if not missing:
                complete.append((layout, files, folder))
            nearest[layout.name] = min(nearest.get(layout.name, missing), missing, key=len)
        read = [set(files.values()) for _, files, _ in complete]
        complete = [one for one in complete if not any(set(one[1].values()) < other for other in read)]
        if len(complete) > 1:
            several = " and ".join(f"{layout.name} in {folder}" for layout, _, folder in complete)
            raise ImportFailed(
                f"{source} contains several layouts of {title}: {several}. Choose one with --layout or --from."
            )
        if complete:
            return complete[0]
        inside = (path for folder in level for path in sorted(folder.iterdir()))
        level = [path for path in inside if path.is_dir() and path.name != "videos" and path != skip]
    absent = "; ".join(f"for {layout} {', '.join(missing)}" for layout, missing in nearest.items())
    raise ImportFailed(
        f"No supported {title} layout found in {source}. Missing files: {absent}. For supported layouts, see "
        "docs/datasets.md."
    )


def _read_videos(dataset: ImportableDataset, contents: dict[str, bytes], report: ImportReport) -> Iterator[Path]:
    """Read the converted files, record differences from the protocol, and yield the target paths of the videos."""
    with TemporaryDirectory() as root:
        folder = Path(root) / dataset.kind.directory
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        read: set[Path] = set()
        for options, counts in dataset.configurations:
            data = dataset.kind(root=root, **options)
            files = {file for name in data.official_splits for file in data.required_files(name)}
            if files <= read or not all(file.is_file() for file in files):
                continue
            read |= files
            configuration = ", ".join(str(option) for option in options.values())
            for name in data.official_splits:
                try:
                    split = data.read_split(name)
                except AnnotationError as error:
                    moved = [replace(p, file=p.file.replace(str(folder), str(report.source))) for p in error.problems]
                    raise AnnotationError(moved) from error
                report.splits[configuration, name] = len(split.videos), len(split.texts)
                expected = counts.get(name, len(split.videos))
                if len(split.videos) != expected:
                    which = f"{configuration}, {name}" if configuration else name
                    found = f"{which} has {len(split.videos):,} videos, but the protocol has {expected:,}"
                    report.differences.append(found)
                yield from (report.folder / video.path.relative_to(folder) for video in split.videos)
