"""Import of a dataset: recognize its layout, convert it, compare it with the protocol, and write the result."""

import filecmp
import itertools
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import IO, Literal, cast

from tvr_lightning.data.importing.layouts import DATASETS, LAYOUTS, PUBLISHED, AnnotationLayout, Files
from tvr_lightning.data.records import SYNTHETIC_FILE, AnnotationError, SplitName
from tvr_lightning.data.video_files import is_video, stem
from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.files import explain_write_errors, write_whole
from tvr_lightning.progress import progress_bar
from tvr_lightning.store.feature_store import file_mark, is_same_file

DEPTH = 2  # levels of subfolders that are searched for annotations
PART = re.compile(r"(?P<whole>.+\.tar(\.gz)?)\.part[-_]?(?P<number>\w+)")
Way = Literal["link", "copy"]


@dataclass
class ImportReport:
    """Result of an import: differences from the protocol, one sentence each, and numbers of videos and texts.

    `new` and `present` count the videos, `unused` have no caption and were not imported, and `absent` have no file.
    """

    title: str
    folder: Path
    layout: AnnotationLayout
    source: Path
    splits: dict[tuple[str, SplitName], tuple[int, int]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    new: int = 0
    present: int = 0
    unused: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a summary for the user, one line per item."""
        yield f"{self.title} in the {self.layout.name} layout: {self.source}"
        for (options, name), (videos, texts) in self.splits.items():
            yield f"  {f'{options}, ' if options else ''}{name}: {videos:,} videos, {texts:,} texts"
        yield from (f"Differs from the protocol: {sentence}" for sentence in self.differences)
        if self.unused:
            yield f"Videos without captions, not imported: {len(self.unused)}, {abbreviated(self.unused)}"
        if self.absent:
            names = f"{len(self.absent)}, {abbreviated(self.absent)}"
            yield f"Captions without videos: {names}. Add the videos and import again."
        new = f"{len(self.written)} annotation files and {self.new} videos"
        yield f"Wrote {self.folder}: {new} are new, {self.present} videos were already there"


def import_dataset(
    dataset: str, source: Path, root: Path, *, layout: str | None = None, way: Way = "link"
) -> ImportReport:
    """Import the annotations and videos in `source` into the folder of the dataset in `root`.

    Nothing is deleted or overwritten. `layout` names the annotation layout, if several are possible.
    """
    target = root.expanduser() / dataset
    chosen, files, folder = _find_layout(dataset, source, layout, target)
    contents = chosen.convert(files) if chosen.convert else {name: path.read_bytes() for name, path in files.items()}
    if (folder / SYNTHETIC_FILE).is_file():
        contents[SYNTHETIC_FILE] = (folder / SYNTHETIC_FILE).read_bytes()
    report = ImportReport(DATASETS[dataset].title, target, chosen, folder)
    if chosen.note:
        report.differences.append(chosen.note)
    folders = _video_folders(dataset, contents, report)
    loose, archives = _find_videos(source)
    for name, content in contents.items():
        file = target / name
        if not file.is_file():
            report.written.append(name)
        elif file.read_bytes() != content:
            raise UserError(f"{file} already exists with different content. Move it, or choose another --root.")
    # Written after all checks and before the videos, whose import may take long and can be resumed.
    for name in report.written:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(target / name, contents[name])
    (target / "videos").mkdir(exist_ok=True)
    _import_videos(report, loose, archives, folders, way)
    placed = (file for folder in set(folders.values()) for file in folder.glob("*") if file.exists())
    present = {(file.parent, stem(file.name)) for file in placed}
    report.absent = [name for name, folder in folders.items() if (folder, name) not in present]
    return report


def _find_layout(dataset: str, source: Path, name: str | None, skip: Path) -> tuple[AnnotationLayout, Files, Path]:
    """Return the layout (only `name`, if given) of the annotations in a folder, their files, and their folder.

    Subfolders are searched too, except `skip`, which earlier imports wrote. Raise UserError unless there is one.
    """
    title = DATASETS[dataset].title
    layouts = [layout for layout in LAYOUTS[dataset] if name in (None, layout.name)]
    if not source.is_dir():
        raise UserError(f"{source} is not a folder. Name the folder with the annotations and the videos of {title}.")
    if not layouts:
        available = ", ".join(dict.fromkeys(layout.name for layout in LAYOUTS[dataset]))
        raise UserError(f"{title} has no layout {name!r}. Available: {available}.")
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
            raise UserError(
                f"{source} contains several layouts of {title}: {several}. Choose one with --layout or --from."
            )
        if fullest:
            return fullest[0]
        inside = (path for folder in level for path in sorted(folder.iterdir()))
        level = [path for path in inside if path.is_dir() and path.name != "videos" and path != skip]
    absent = "; ".join(f"for {layout} {', '.join(missing)}" for layout, missing in nearest.items())
    raise UserError(
        f"No supported {title} layout found in {source}. Missing files: {absent}. For supported layouts, see "
        "docs/datasets.md."
    )


def _video_folders(dataset: str, contents: dict[str, bytes], report: ImportReport) -> dict[str, Path]:
    """Read the converted files, record their splits in the report, and return the target folder of every video."""
    folders: dict[str, Path] = {}
    with TemporaryDirectory() as root:
        folder = Path(root) / dataset
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        read: set[Path] = set()
        for options, counts in PUBLISHED[dataset]:
            data = DATASETS[dataset](root=root, **options)
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


def _find_videos(folder: Path) -> tuple[dict[str, Path], list[list[Path]]]:
    """Return the videos in a folder and its subfolders by name without suffix, and each archive as a list of parts."""
    loose: dict[str, Path] = {}
    archives: list[list[Path]] = []
    parts: dict[str, dict[str, Path]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        part = PART.fullmatch(path.name)
        if part is not None:
            parts.setdefault(str(path.with_name(part["whole"])), {})[part["number"]] = path
        elif path.name.lower().endswith((".zip", ".tar", ".tar.gz", ".tgz")):
            archives.append([path])
        elif is_video(path.name):
            other = loose.setdefault(stem(path.name), path)
            if other != path and not filecmp.cmp(other, path, shallow=False):
                raise UserError(f"{other} and {path} have the same name but differ. Move one of them.")
    for whole, numbered in parts.items():
        order = sorted(numbered)
        if all(number.isdigit() for number in order):
            order.sort(key=int)
            if absent := set(range(1, int(order[-1]))) - set(map(int, order)):
                raise UserError(f"{whole}: part {min(absent)} is missing. Download it, too.")
        archives.append([numbered[number] for number in order])
    return loose, archives


def _import_videos(
    report: ImportReport,
    loose: dict[str, Path],
    archives: list[list[Path]],
    folders: dict[str, Path],
    way: Way,
) -> None:
    """Link, copy or unpack videos to their folders. Existing ones are kept, so rerunning resumes an interrupted import.

    `loose` and `folders` are files and target folders by name without suffix; archives are always unpacked.
    """
    report.unused = sorted(loose.keys() - folders.keys())
    targets = {file: folders[name] / file.name for name, file in loose.items() if name in folders}
    for file, target in targets.items():  # all of them before anything is written
        if target.exists() and not target.samefile(file) and not is_same_file(target, file_mark(file)):
            raise UserError(f"{target} already exists and is not {file}. Move it.")
    place = next(iter(folders.values()), Path())
    with progress_bar() as bar, explain_write_errors(place, "Imported videos are kept."):
        title = "linking videos" if way == "link" else "copying videos"
        for file, target in bar.track(targets.items(), description=title):
            if target.exists():
                report.present += 1
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a link to a file that has moved
            if way == "link":
                target.symlink_to(file.resolve())
            else:
                write_whole(target, file.read_bytes())
            report.new += 1
        for parts in archives:
            try:
                videos = bar.track(_videos_in(parts), total=len(folders), description=f"unpacking {parts[0].name}")
                for file_name, content in videos:
                    name = stem(file_name)
                    if name not in folders:
                        report.unused.append(name)
                    elif name not in loose:
                        target = folders[name] / file_name
                        if not target.exists():
                            target.parent.mkdir(parents=True, exist_ok=True)
                            write_whole(target, content.read())
                            report.new += 1
                        elif target.read_bytes() == content.read():
                            report.present += 1
                        else:
                            raise UserError(
                                f"{target} already exists and differs from the file in the archive. Move it."
                            )
            except (zipfile.BadZipFile, tarfile.ReadError, EOFError, zlib.error) as error:
                raise UserError(
                    f"{parts[0]} is truncated or damaged ({error}). Download it again and rerun the command."
                ) from error
            except RuntimeError as error:  # encrypted, or compressed by a method that Python does not have
                raise UserError(f"{parts[0]}: {error}. Unpack it, and import the folder with its files.") from error


def _videos_in(parts: list[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the file name and the content of each video of an archive."""
    if parts[0].suffix.lower() == ".zip":
        with zipfile.ZipFile(parts[0]) as archive:
            for entry in archive.infolist():
                if is_video(entry.filename):
                    with archive.open(entry) as content:
                        yield Path(entry.filename).name, content
        return
    with _open_tar(parts) as tar:
        # Reads to the end before anything is unpacked: at an invalid header, tarfile would stop silently, and the
        # members of a tar archive have no checksums.
        for _ in tar:
            pass
        rest = cast("IO[bytes]", tar.fileobj)
        while block := rest.read(2**20):
            if block.strip(b"\0"):
                raise tarfile.ReadError("a header is invalid; its parts may not belong together")
    with _open_tar(parts) as tar:
        for member in tar:
            if member.isfile() and is_video(member.name):
                yield Path(member.name).name, cast("IO[bytes]", tar.extractfile(member))


@contextmanager
def _open_tar(parts: list[Path]) -> Iterator[tarfile.TarFile]:
    with Popen(["cat", *parts], stdout=PIPE) as joined, tarfile.open(fileobj=joined.stdout, mode="r|*") as tar:
        yield tar
