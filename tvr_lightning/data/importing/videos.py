"""Import of video files from folders or archives, by linking, copying or unpacking."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Literal

from tvr_lightning.data.importing.names import is_video, stem
from tvr_lightning.errors import UserError
from tvr_lightning.files import TEMPORARY
from tvr_lightning.progress import progress_bar

PART = re.compile(r"(?P<whole>.+\.tar(\.gz)?)\.part[-_]?(?P<number>\w+)")
CHUNK = 2**20
Way = Literal["link", "copy"]
Opens = Callable[[], AbstractContextManager[IO[bytes]]]
Member = tuple[str, int, Opens]


class ImportFailed(UserError):  # noqa: N818  reads as what happened
    """Error for files to import that cannot be recognized, read, or written to their target."""

    exit_status = 2


@dataclass
class Archive:
    """Zip or tar archive; a tar archive can have several parts.

    Attributes:
        name: File name of the whole archive.
        parts: Files of the archive, in order.
    """

    name: str
    parts: list[Path]

    def members(self) -> Iterator[Member]:
        """Yield the name, size in bytes and opener of each video; open it before requesting the next one."""
        return self._zip() if self.name.lower().endswith(".zip") else self._tar()

    def check(self) -> None:
        """Read a tar archive to its end; the members of a zip archive have checksums that are checked when unpacking.

        Raises:
            tarfile.ReadError: The archive is truncated or has an invalid header, where tarfile would stop silently.
        """
        if self.name.lower().endswith(".zip"):
            return
        with _Joined(self.parts) as joined, tarfile.open(fileobj=joined, mode="r|*") as archive:
            for _ in archive:
                pass
            assert archive.fileobj is not None
            while rest := archive.fileobj.read(CHUNK):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("a header is invalid; its parts may not belong together")

    @contextmanager
    def read(self) -> Iterator[None]:
        """Convert errors from reading the archive in this context into a one-line message.

        Raises:
            ImportFailed: The archive is truncated or damaged.
        """
        try:
            yield
        except (zipfile.BadZipFile, tarfile.ReadError, EOFError, zlib.error) as error:
            raise ImportFailed(
                f"{self.parts[0]} is truncated or damaged ({error}). Download it again and rerun the command."
            ) from error

    def _zip(self) -> Iterator[Member]:
        with zipfile.ZipFile(self.parts[0]) as archive:
            for item in archive.infolist():
                if not item.is_dir() and is_video(item.filename):
                    yield Path(item.filename).name, item.file_size, partial(archive.open, item)

    def _tar(self) -> Iterator[Member]:
        with _Joined(self.parts) as joined, tarfile.open(fileobj=joined, mode="r|*") as archive:
            for item in archive:
                if item.isfile() and is_video(item.name):
                    yield Path(item.name).name, item.size, partial(_opened, archive, item)


@contextmanager
def _opened(archive: tarfile.TarFile, item: tarfile.TarInfo) -> Iterator[IO[bytes]]:
    source = archive.extractfile(item)
    assert source is not None  # a regular file
    with source:
        yield source


class _Joined(io.RawIOBase):
    """Concatenation of files, as with `cat`."""

    def __init__(self, parts: list[Path]) -> None:
        self.parts = iter(parts)
        self.current: IO[bytes] | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; fewer only at the end of the last part."""
        found = b""
        while len(found) < size:
            if self.current is None:
                part = next(self.parts, None)
                if part is None:
                    break
                self.current = part.open("rb")
            read = self.current.read(size - len(found))
            if not read:
                self.current.close()
                self.current = None
            found += read
        return found


@dataclass
class Held:
    """Video files and archives of the source.

    Attributes:
        loose: Video files by their names without suffix.
        archives: Zip and tar archives.
    """

    loose: dict[str, Path] = field(default_factory=dict)
    archives: list[Archive] = field(default_factory=list)


def find_videos(folder: Path) -> Held:
    """Return the videos and archives in a folder and its subfolders.

    Raises:
        ImportFailed: Two different files have the same name, or a part of an archive is missing.
    """
    held = Held()
    parts: dict[str, list[tuple[str, Path]]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        part = PART.fullmatch(path.name)
        if part is not None:
            parts.setdefault(str(path.with_name(part["whole"])), []).append((part["number"], path))
        elif path.name.lower().endswith((".zip", ".tar", ".tar.gz", ".tgz")):
            held.archives.append(Archive(path.name, [path]))
        elif is_video(path.name):
            other = held.loose.setdefault(stem(path.name), path)
            if other != path and other.stat().st_size != path.stat().st_size:
                raise ImportFailed(f"{other} and {path} have the same name but differ. Move one of them.")
    for whole, found in parts.items():
        numbers = [number for number, _ in found]
        if all(number.isdigit() for number in numbers):
            present = sorted(map(int, numbers))
            gap = next((n for n in range(present[0], present[-1]) if n not in present), None)
            if gap is not None or present[0] > 1:
                raise ImportFailed(f"{whole}: part {gap if gap is not None else 0} is missing. Download it, too.")
            found.sort(key=lambda part: int(part[0]))
        held.archives.append(Archive(Path(whole).name, [path for _, path in found]))
    return held


@dataclass
class Placed:
    """Result of importing videos.

    Attributes:
        new: Number of videos that were linked, copied or unpacked.
        present: Number of videos that already existed.
        unused: Names of videos without a caption, which were not imported.
    """

    new: int = 0
    present: int = 0
    unused: list[str] = field(default_factory=list)


def place_videos(held: Held, wanted: Mapping[str, Path], way: Way, progress: bool = True) -> Placed:
    """Link, copy or unpack videos to their targets. Existing ones are kept, so rerunning resumes an interrupted import.

    Args:
        held: Source videos.
        wanted: Target folder of each video, by name without suffix.
        way: Method for single files: "link" or "copy". Archives are always unpacked.
        progress: Whether to show a progress bar.

    Raises:
        ImportFailed: A different file with the same name exists, or an archive is truncated.
    """
    placed = Placed(unused=sorted(name for name in held.loose if name not in wanted))
    _check_free(held, wanted)
    with progress_bar(progress) as bar:
        mine = [name for name in held.loose if name in wanted]
        for name in bar.track(mine, description=f"{'linking' if way == 'link' else 'copying'} videos"):
            source = held.loose[name]
            target = wanted[name] / source.name
            if target.exists():
                placed.present += 1
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if way == "link":
                target.symlink_to(source.resolve())
            else:
                with source.open("rb") as opened:
                    _write(opened, target)
            placed.new += 1
        for archive in held.archives:
            task = bar.add_task(f"checking {archive.name}", total=None)
            with archive.read():
                archive.check()
                bar.update(task, description=f"unpacking {archive.name}")
                for file, size, opens in archive.members():
                    bar.advance(task)
                    name = stem(file)
                    if name not in wanted:
                        placed.unused.append(name)
                    elif name not in held.loose:
                        _unpack(wanted[name] / file, size, opens, placed)
            bar.update(task, total=bar.tasks[task].completed)
    return placed


def _check_free(held: Held, wanted: Mapping[str, Path]) -> None:
    """Raise an error before anything is written if another file has the name of a video."""
    for name, source in held.loose.items():
        if name in wanted:
            target = wanted[name] / source.name
            if target.is_symlink() and not target.exists():
                raise ImportFailed(f"{target} is a link to a missing file. Remove it.")
            if target.exists() and not target.samefile(source) and target.stat().st_size != source.stat().st_size:
                raise ImportFailed(f"{target} already exists and is not {source}. Move it.")


def _unpack(target: Path, size: int, opens: Opens, placed: Placed) -> None:
    if target.exists():
        if target.stat().st_size != size:
            raise ImportFailed(f"{target} already exists and differs from the file in the archive. Move it.")
        placed.present += 1
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with opens() as source:
        _write(source, target, size)
    placed.new += 1


def _write(source: IO[bytes], target: Path, size: int | None = None) -> None:
    """Write a file atomically."""
    temporary = target.with_name(target.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            shutil.copyfileobj(source, file, CHUNK)
        if size is not None and temporary.stat().st_size != size:
            raise EOFError(f"{target.name} ends after {temporary.stat().st_size} of {size} bytes")
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
