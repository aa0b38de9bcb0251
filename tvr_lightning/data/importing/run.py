"""Import of a dataset: recognize its layout, convert it, compare it with the protocol, and write the result."""

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
        layout: Recognized layout of the annotations in the folder `source`.
        splits: Numbers of videos and texts, by configuration and split.
        differences: Differences from the protocol, one sentence each.
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
    dataset: str, source: Path, root: Path, *, layout: str | None = None, way: Way = "link", progress: bool = True
) -> ImportReport:
    """Import a dataset into the expected layout in `root`; nothing is deleted or overwritten.

    Args:
        dataset: Folder name of the dataset.
        source: Folder of its annotations and videos.
        root: Parent folder of the imported datasets.
        layout: Name of the annotation layout, if several are possible.
        way: Method of placing videos: "link" or "copy".
        progress: Whether to show progress bars.
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
    folders = _video_folders(importable, contents, report)
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
    placed = (file for folder in set(folders.values()) for file in folder.glob("*") if file.exists())
    present = {(file.parent, stem(file.name)) for file in placed}
    report.absent = [name for name, folder in folders.items() if (folder, name) not in present]
    return report


def find_layout(
    dataset: ImportableDataset, source: Path, name: str | None = None, skip: Path | None = None
) -> tuple[AnnotationLayout, Files, Path]:
    """Return the layout (only `name`, if given) of the annotations in a folder, their files, and their folder.

    Subfolders are searched too, except `skip`, which earlier imports wrote. Raise ImportFailed unless there is one.
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
        complete: dict[frozenset[Path], tuple[AnnotationLayout, Files, Path]] = {}
        for folder, layout in itertools.product(level, layouts):
            found, missing = layout.find(folder)
            if not missing:
                complete[frozenset(found.values())] = layout, found, folder
            nearest[layout.name] = min(nearest.get(layout.name, missing), missing, key=len)
        fullest = [one for files, one in complete.items() if not any(files < others for others in complete)]
        if len(fullest) > 1:
            several = " and ".join(f"{layout.name} in {folder}" for layout, _, folder in fullest)
            raise ImportFailed(
                f"{source} contains several layouts of {title}: {several}. Choose one with --layout or --from."
            )
        if fullest:
            return fullest[0]
        inside = (path for folder in level for path in sorted(folder.iterdir()))
        level = [path for path in inside if path.is_dir() and path.name != "videos" and path != skip]
    absent = "; ".join(f"for {layout} {', '.join(missing)}" for layout, missing in nearest.items())
    raise ImportFailed(
        f"No supported {title} layout found in {source}. Missing files: {absent}. For supported layouts, see "
        "docs/datasets.md."
    )


def _video_folders(dataset: ImportableDataset, contents: dict[str, bytes], report: ImportReport) -> dict[str, Path]:
    """Read the converted files, record their splits in the report, and return the target folder of every video."""
    folders: dict[str, Path] = {}
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
                for video in split.videos:
                    folders[stem(video.path.name)] = report.folder / video.path.parent.relative_to(folder)
    return folders
