"""`tvr data compress`: a dataset's videos copied small, with its annotation files, to train from."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO

from tvr_lightning.data.base import STAGES, TextVideoDataModule
from tvr_lightning.data.copies import MANIFEST, CopiedFile, Copies, changed, read_copies
from tvr_lightning.data.records import SYNTHETIC_FILE, SplitName
from tvr_lightning.data.recover_captions import find_captions
from tvr_lightning.errors import UserError
from tvr_lightning.files import held, remedy, write_whole
from tvr_lightning.media.compression import Compression, compress, verify_copy
from tvr_lightning.media.opening import VideoError
from tvr_lightning.media.read_many import Unread, read_many
from tvr_lightning.progress import progress_bar


@dataclass(frozen=True)
class Job:
    """One file to copy.

    Attributes:
        source, target: where it is, and where its copy goes.
        name: of the copy, below the folder of copies. source_name: of the source, below its folder.
        known: what the manifest has of it.
        video: whether it is a video; an annotation file is copied as it is.
    """

    source: Path
    target: Path
    name: str
    source_name: str
    known: CopiedFile | None
    video: bool


@dataclass
class Done:
    """What became of the files.

    Attributes:
        folder: of the dataset's copies.
        root: what `data.init_args.root` is to be to train on them.
        new: how many were copied now.
        kept: how many were there already, whole and of the same source.
        redone: those of them that were not, each with the reason.
        notes: what of a copy is not as in its original.
        unread: videos that cannot be read, each with the reason; they have no copy.
        bytes: of all copies. source_bytes: of their originals.
    """

    folder: Path
    root: Path
    new: int = 0
    kept: int = 0
    redone: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    bytes: int = 0
    source_bytes: int = 0

    def lines(self) -> list[str]:
        """Return what a user wants to know."""
        share = f"{self.bytes / 1e6:,.1f} MB of {self.source_bytes / 1e6:,.1f} MB"
        found = [f"copied {self.new} files, kept {self.kept} ({share}) in {self.folder}"]
        found += [f"copied again: {line}" for line in self.redone]
        found += [f"note: {line}" for line in self.notes]
        found += [f"skipped: {line}" for line in self.unread]
        return [*found, f"next: train with --data.init_args.root={self.root}"]


def compress_dataset(
    data: TextVideoDataModule, out: Path, how: Compression, *, workers: int = 1, progress: bool = True
) -> Done:
    """Copy all videos of a dataset's splits small, and its annotation files as they are, in the dataset's own layout.

    The same call goes on after a kill; what is there is compared with the manifest and with its source, and made anew
    where either differs.

    Args:
        data: the dataset, as configured; its `root` is where the originals are.
        out: folder that becomes the `root` of the copies.
        how: frame rate, size and kind of the copies.
        workers: processes that decode and encode.
        progress: whether a bar is shown.

    Raises:
        MissingData, AnnotationError: the dataset is not complete, or contradicts itself.
        UserError: the originals are copies themselves, or the folder holds copies that were made otherwise.
        UserError: the disk is full or not writable.
        UserError: another process writes them.
    """
    data.check_present()
    target = copy.copy(data)
    target.root = str(out)
    source, folder = data.folder.resolve(), target.folder
    if folder.resolve() == source:
        raise UserError(f"--out {out} is the folder of the originals. Choose another folder.")
    if read_copies(source) is not None:
        raise UserError(f"{source} already contains copies. Set data.init_args.root to the folder of the originals.")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    busy = UserError(f"Another process is writing the copies in {folder}. Wait for it or stop it.")
    with held(folder / f"{MANIFEST}.lock", busy, "do not start a second tvr data compress with the same --out"):
        copies = _open(folder, source, how)
        jobs = list(_jobs(data, source, folder, copies))
        done = Done(folder, out)
        manifest = folder / MANIFEST
        with _writing(manifest):
            if not copies.length:
                write_whole(manifest, _line(copies.header()))
                copies.length = manifest.stat().st_size
            lines = manifest.open("ab", buffering=0)
        with lines:
            lines.truncate(copies.length)
            _run(jobs, how, copies, lines, done, workers, progress)
        done.bytes = sum(file.copy_size for file in copies.files.values())
        done.source_bytes = sum(file.size for file in copies.files.values())
        records = [copies.header(), *(asdict(file) for file in copies.files.values())]
        with _writing(manifest):
            write_whole(manifest, b"".join(map(_line, records)))
    return done


def _open(folder: Path, source: Path, how: Compression) -> Copies:
    copies = read_copies(folder)
    if copies is None:
        return Copies(folder, source, how)
    if copies.how != how:
        raise UserError(
            f"{folder} contains copies {copies.how.describe()}, {copies.how.interpolation}, not {how.describe()}, "
            f"{how.interpolation}. Choose another --out, or resume with the same options."
        )
    if copies.source != source:
        raise UserError(
            f"{folder} contains copies of {copies.source}, not of {source}. Choose another --out, or that root."
        )
    return copies


def _jobs(data: TextVideoDataModule, source: Path, folder: Path, copies: Copies) -> Iterator[Job]:
    """Yield the annotation files, and every video that the splits name and that is there.

    Raises:
        UserError: two videos would have one copy.
    """
    names: tuple[SplitName, ...] = STAGES[None] if data.validation == "official" else ("train", "test")
    data = copy.copy(data)  # of which all training videos are copied, whatever the recipe draws or holds out
    data.holdout, data.max_train_videos, data._read = 0, None, {}
    files = {path for name in names for path in data.required_files(name)}
    if data.extra_captions is not None:
        files.add(find_captions(data.extra_captions, data.folder))
    if data.warnings:
        files.add(data.folder / SYNTHETIC_FILE)
    for path in sorted(files):
        if path.resolve().is_relative_to(source):
            name = path.relative_to(data.folder).as_posix()
            yield Job(path, folder / name, name, name, copies.files.get(name), video=False)
    taken: dict[str, Path] = {}
    for path in dict.fromkeys(video.path for name in names for video in data.read_split(name).videos):
        name = path.relative_to(data.folder).with_suffix(".mp4").as_posix()
        other = taken.setdefault(name, path)
        if other != path:
            raise UserError(f"{other} and {path} would both become {name}. Rename one of them.")
        source_name = path.relative_to(data.folder).as_posix()
        yield Job(path, folder / name, name, source_name, copies.files.get(name), video=True)


def _run(
    jobs: list[Job], how: Compression, copies: Copies, lines: IO[bytes], done: Done, workers: int, progress: bool
) -> None:
    make: Callable[[Job], tuple[CopiedFile, str | None]] = partial(copy_file, how=how)
    with progress_bar(progress) as bar:
        task = bar.add_task(f"copying, {how.describe()}", total=len(jobs))
        found = read_many([[job] for job in jobs], make, list, workers=0 if workers == 1 else workers)
        for job, (result,) in zip(jobs, found, strict=True):
            bar.advance(task)
            if isinstance(result, Unread):
                done.unread.append(f"{job.source}: {result.reason}")
                continue
            file, reason = result
            if file == job.known:
                done.kept += 1
            else:
                with _writing(copies.folder / MANIFEST):
                    _append(lines, asdict(file))
                copies.files[file.copy] = file
                done.kept, done.new = done.kept + (reason == ""), done.new + (reason != "")
            if reason:
                done.redone.append(f"{job.target}: {reason}")
            done.notes += [f"{job.source}: {note}" for note in file.notes]


def copy_file(job: Job, how: Compression) -> tuple[CopiedFile, str | None]:
    """Copy a file unless that is done; return its line of the manifest, and why it was made anew.

    The reason is None where it was not there before, and empty where it was kept.

    Raises:
        VideoError: a video cannot be read.
        UserError: the disk is full or not writable.
    """
    reason = None
    if job.known is not None:
        file, reason = _kept(job, job.known)
        if file is not None:
            return file, ""
    if not job.source.is_file():
        raise VideoError(job.source, "there is no such file")
    stat = job.source.stat()
    made = compress(job.source, how) if job.video else None
    content = made.content if made else job.source.read_bytes()
    with _writing(job.target):
        job.target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(job.target, content)
    if made is not None:
        try:
            verify_copy(job.target, made)
        except VideoError:
            job.target.unlink()
            raise
    after = job.source.stat()
    if (after.st_size, after.st_mtime_ns) != (stat.st_size, stat.st_mtime_ns):
        raise VideoError(job.source, "it changed while it was copied")
    file = CopiedFile(
        job.name,
        job.source_name,
        stat.st_size,
        stat.st_mtime_ns,
        digest(job.source),
        len(content),
        hashlib.sha256(content).hexdigest(),
        made.frames if made else 0,
        made.notes if made else [],
    )
    return file, reason


def _kept(job: Job, known: CopiedFile) -> tuple[CopiedFile | None, str]:
    """Return what the manifest is to hold of a copy that is whole and of its source; else None, and what is wrong."""
    if not job.target.is_file():
        return None, "it was missing"
    if job.target.stat().st_size != known.copy_size or digest(job.target) != known.copy_sha256:
        return None, "it had changed"
    if not job.source.is_file():
        return None, "its source is missing"
    if known.source == job.source_name and not changed(job.source, known):
        return known, ""
    if digest(job.source) != known.sha256:
        return None, f"its source {job.source} has changed"
    stat = job.source.stat()  # touched, or copied from elsewhere, but the same
    return replace(known, source=job.source_name, size=stat.st_size, modified=stat.st_mtime_ns), ""


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def _line(record: object) -> bytes:
    return (json.dumps(record) + "\n").encode()


def _append(lines: IO[bytes], record: object) -> None:
    """Put a line at the manifest's end and onto the disk."""
    line = memoryview(_line(record))
    while line:  # a disk that fills up takes a part before it refuses
        line = line[lines.write(line) :]
    os.fsync(lines.fileno())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}. Earlier copies are kept. To resume, {remedy(error)} "
            "and rerun the command."
        ) from error
