"""Compressed copies of datasets for training (`tvr data compress`): smaller videos with the same annotation files."""

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
from tvr_lightning.files import file_lock, remedy, write_whole
from tvr_lightning.media.compression import Compression, compress, verify_copy
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.read_many import Unread, read_many
from tvr_lightning.progress import progress_bar


@dataclass(frozen=True)
class Job:
    """One file to copy.

    Attributes:
        source: Path of the original.
        target: Path of the copy.
        name: Path of the copy relative to the folder of copies.
        source_name: Path of the original relative to its folder.
        known: Entry of the copy in the manifest.
        video: Whether the file is a video. Annotation files are copied unchanged.
    """

    source: Path
    target: Path
    name: str
    source_name: str
    known: CopiedFile | None
    video: bool


@dataclass
class Done:
    """Result of copying a dataset.

    Attributes:
        folder: Folder of the copies of the dataset.
        root: Value of `data.init_args.root` for training on the copies.
        new: Number of newly copied files.
        kept: Number of existing copies that are complete and match their source.
        redone: Existing copies that were replaced, each with the reason.
        notes: Differences between copies and their originals.
        unread: Unreadable videos, which have no copy, each with the reason.
        bytes: Total size of the copies.
        source_bytes: Total size of the originals.
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
        """Return a summary for the user, one line per item."""
        share = f"{self.bytes / 1e6:,.1f} MB of {self.source_bytes / 1e6:,.1f} MB"
        found = [f"copied {self.new} files, kept {self.kept} ({share}) in {self.folder}"]
        found += [f"copied again: {line}" for line in self.redone]
        found += [f"note: {line}" for line in self.notes]
        found += [f"skipped: {line}" for line in self.unread]
        return [*found, f"next: train with --data.init_args.root={self.root}"]


def compress_dataset(
    data: TextVideoDataModule, out: Path, how: Compression, *, workers: int = 1, progress: bool = True
) -> Done:
    """Copy all videos of a dataset's splits at reduced size, and its annotation files unchanged, in the same layout.

    The same call resumes an interrupted run. Existing copies are compared with the manifest and with their source, and
    made again if they differ from either.

    Args:
        data: Dataset as configured; its `root` is the folder of the originals.
        out: Folder that becomes the `root` of the copies.
        how: Frame rate, size and kind of the copies.
        workers: Number of processes that decode and encode.
        progress: Whether to show a progress bar.

    Raises:
        MissingAssetError: Files of the dataset are missing.
        AnnotationError: The annotation files contradict themselves.
        UserError: The originals are copies themselves, the folder contains copies made with other settings, the disk
            is full or not writable, or another process is writing the copies.
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
    with file_lock(folder / f"{MANIFEST}.lock", busy, "do not start a second tvr data compress with the same --out"):
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
    """Yield the annotation files and every existing video of the splits.

    Raises:
        UserError: Two videos have the same target path.
    """
    names: tuple[SplitName, ...] = STAGES[None] if data.validation == "official" else ("train", "test")
    data = copy.copy(data)  # all training videos are copied, including those that a recipe holds out or does not sample
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
    """Copy a file unless it is up to date; return its entry in the manifest and the reason for copying it again.

    The reason is None for a new copy, and empty if the existing copy was kept.

    Raises:
        VideoError: A video cannot be read.
        UserError: The disk is full or not writable.
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
    """Return the manifest entry of a copy that is complete and matches its source; otherwise None and the reason."""
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
    stat = job.source.stat()  # touched or copied from elsewhere, but with the same content
    return replace(known, source=job.source_name, size=stat.st_size, modified=stat.st_mtime_ns), ""


def digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def _line(record: object) -> bytes:
    return (json.dumps(record) + "\n").encode()


def _append(lines: IO[bytes], record: object) -> None:
    """Append a line to the manifest and flush it to disk."""
    line = memoryview(_line(record))
    while line:  # a nearly full disk accepts part of a write before it fails
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
