"""Import of video files from folders or archives, by linking, copying or unpacking."""

import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, Literal, cast

from tvr_lightning.data.video_files import is_video, stem
from tvr_lightning.errors import UserError
from tvr_lightning.files import explain_write_errors, write_whole
from tvr_lightning.progress import progress_bar
from tvr_lightning.store.shard import file_mark, is_same_file

ENCRYPTED = 0x1  # flag of a member of a zip archive
PART = re.compile(r"(?P<whole>.+\.tar(\.gz)?)\.part[-_]?(?P<number>\w+)")
Way = Literal["link", "copy"]


class ImportFailed(UserError):  # noqa: N818  reads as what happened
    """Error for files to import that cannot be recognized, read, or written to their target."""

    exit_status = 2  # 1 is the status of an import with missing videos


def find_videos(folder: Path) -> tuple[dict[str, Path], list[list[Path]]]:
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
            if other != path and other.stat().st_size != path.stat().st_size:
                raise ImportFailed(f"{other} and {path} have the same name but differ. Move one of them.")
    for whole, numbered in parts.items():
        order = sorted(numbered)
        if all(number.isdigit() for number in order):
            order.sort(key=int)
            if absent := set(range(1, int(order[-1]))) - set(map(int, order)):
                raise ImportFailed(f"{whole}: part {min(absent)} is missing. Download it, too.")
        archives.append([numbered[number] for number in order])
    return loose, archives


@dataclass
class ImportedVideos:
    """Numbers of newly imported and of existing videos, and the names of those without a caption (not imported)."""

    new: int = 0
    present: int = 0
    unused: list[str] = field(default_factory=list)


def import_videos(
    loose: Mapping[str, Path], archives: list[list[Path]], folders: Mapping[str, Path], way: Way, progress: bool = True
) -> ImportedVideos:
    """Link, copy or unpack videos to their folders. Existing ones are kept, so rerunning resumes an interrupted import.

    Args:
        loose: Video files by name without suffix.
        archives: Zip and tar archives, each as a list of its parts in order; they are always unpacked.
        folders: Target folder of each video, by name without suffix.
        way: Method for single files: "link" or "copy".
        progress: Whether to show a progress bar.
    """
    result = ImportedVideos(unused=sorted(loose.keys() - folders.keys()))
    targets = {file: folders[name] / file.name for name, file in loose.items() if name in folders}
    for file, target in targets.items():  # all of them before anything is written
        if target.exists() and not target.samefile(file) and not is_same_file(target, file_mark(file)):
            raise ImportFailed(f"{target} already exists and is not {file}. Move it.")
    place, kept = next(iter(folders.values()), Path()), "Imported videos are kept."
    with progress_bar(progress) as bar, explain_write_errors(place, kept, kind=ImportFailed):
        title = "linking videos" if way == "link" else "copying videos"
        for file, target in bar.track(targets.items(), description=title):
            if target.exists():
                result.present += 1
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # a link to a file that has moved
            if way == "link":
                target.symlink_to(file.resolve())
            else:
                write_whole(target, file.read_bytes())
            result.new += 1
        for parts in archives:
            try:
                videos = bar.track(_videos_in(parts), total=len(folders), description=f"unpacking {parts[0].name}")
                for file_name, content in videos:
                    name = stem(file_name)
                    if name not in folders:
                        result.unused.append(name)
                    elif name not in loose:
                        target = folders[name] / file_name
                        if not target.exists():
                            target.parent.mkdir(parents=True, exist_ok=True)
                            write_whole(target, content.read())
                            result.new += 1
                        elif target.read_bytes() == content.read():
                            result.present += 1
                        else:
                            raise ImportFailed(
                                f"{target} already exists and differs from the file in the archive. Move it."
                            )
            except (zipfile.BadZipFile, tarfile.ReadError, EOFError, zlib.error) as error:
                raise ImportFailed(
                    f"{parts[0]} is truncated or damaged ({error}). Download it again and rerun the command."
                ) from error
    return result


def _videos_in(parts: list[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the file name and the content of each video of an archive."""
    if parts[0].suffix.lower() == ".zip":
        with zipfile.ZipFile(parts[0]) as archive:
            for entry in archive.infolist():
                if is_video(entry.filename):
                    if entry.flag_bits & ENCRYPTED:
                        raise ImportFailed(f"{parts[0]} is encrypted. Unpack it, and import the folder with its files.")
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
