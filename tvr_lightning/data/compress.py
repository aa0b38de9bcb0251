"""Compressed copies of datasets for training (`tvr data compress`): smaller videos with the same annotation files."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.copies import MANIFEST, CopiedFile, Copies, read_copies
from tvr_lightning.data.records import SYNTHETIC_FILE
from tvr_lightning.data.recover_captions import find_captions
from tvr_lightning.errors import UserError
from tvr_lightning.files import Journal, explain_write_errors, write_whole
from tvr_lightning.media.compression import Compression, compress, verify_copy
from tvr_lightning.media.container import VideoError
from tvr_lightning.media.read_many import Unread, read_many
from tvr_lightning.progress import progress_bar

KEPT = "Earlier copies are kept."


@dataclass(frozen=True)
class CopyJob:
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
class CompressReport:
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
) -> CompressReport:
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
        UserError: Files of the dataset are missing, the originals are copies themselves, the folder contains copies
            made with other settings, the disk is full or not writable, or another process is writing the copies.
    """
    data.check_present()
    target = copy.copy(data)
    target.root = str(out)
    source, folder = data.folder.resolve(), target.folder
    if folder.resolve() == source:
        raise UserError(f"--out {out} is the folder of the originals. Choose another folder.")
    if read_copies(source) is not None:
        raise UserError(f"{source} already contains copies. Set data.init_args.root to the folder of the originals.")
    busy = UserError(f"Another process is writing the copies in {folder}. Wait for it or stop it.")
    advice = "do not start a second tvr data compress with the same --out"
    with Journal.open(folder / MANIFEST, Copies(folder, source, how).header(), busy, advice, KEPT) as journal:
        copies = read_copies(folder)
        assert copies is not None
        _check_settings(copies, source, how)
        jobs = list(_jobs(data, source, copies))
        report = CompressReport(folder, out)
        with progress_bar(progress) as bar:
            task = bar.add_task(f"copying, {how.describe()}", total=len(jobs))
            read = partial(copy_file, how=how)
            found = read_many([[job] for job in jobs], read, list, workers=0 if workers == 1 else workers)
            for job, (result,) in zip(jobs, found, strict=True):
                bar.advance(task)
                if isinstance(result, Unread):
                    report.unread.append(f"{job.source}: {result.reason}")
                    continue
                file, reason = result
                if file != job.known:
                    journal.append(asdict(file))
                    copies.files[file.copy] = file
                report.kept, report.new = report.kept + (reason == ""), report.new + (reason != "")
                if reason:
                    report.redone.append(f"{job.target}: {reason}")
                report.notes += [f"{job.source}: {note}" for note in file.notes]
        report.bytes = sum(file.copy_size for file in copies.files.values())
        report.source_bytes = sum(file.size for file in copies.files.values())
        journal.rewrite(asdict(file) for file in copies.files.values())
    return report


def _check_settings(copies: Copies, source: Path, how: Compression) -> None:
    if copies.how != how:
        raise UserError(
            f"{copies.folder} contains copies {copies.how.describe()}, {copies.how.interpolation}, not "
            f"{how.describe()}, {how.interpolation}. Choose another --out, or resume with the same options."
        )
    if copies.source != source:
        raise UserError(
            f"{copies.folder} contains copies of {copies.source}, not of {source}. Choose another --out, or that root."
        )


def _jobs(data: TextVideoDataModule, source: Path, copies: Copies) -> Iterator[CopyJob]:
    """Yield the annotation files and every existing video of the splits."""
    data = copy.copy(data)  # all training videos are copied, including those that a recipe holds out or does not sample
    data.holdout, data.max_train_videos, data._read = 0, None, {}
    files = {path for name in data.official_splits for path in data.required_files(name)}
    if data.extra_captions is not None:
        files.add(find_captions(data.extra_captions, data.folder))
    if data.warnings:
        files.add(data.folder / SYNTHETIC_FILE)
    videos = dict.fromkeys(video.path for name in data.official_splits for video in data.read_split(name).videos)
    targets: dict[str, Path] = {}
    for path in [*(file for file in sorted(files) if file.resolve().is_relative_to(source)), *videos]:
        source_name = path.relative_to(data.folder)
        name = (source_name.with_suffix(".mp4") if path in videos else source_name).as_posix()
        other = targets.setdefault(name, path)
        if other != path:
            raise UserError(f"{other} and {path} would both become {name}. Rename one of them.")
        known = copies.files.get(name)
        yield CopyJob(path, copies.folder / name, name, source_name.as_posix(), known, video=path in videos)


def copy_file(job: CopyJob, how: Compression) -> tuple[CopiedFile, str | None]:
    """Copy a file unless it is up to date; return its entry in the manifest and the reason for copying it again.

    The reason is None for a new copy, and empty if the existing copy was kept. Raises VideoError if a video cannot be
    read.
    """
    if not job.source.is_file():
        raise VideoError(job.source, "there is no such file")
    reason = None if job.known is None else _difference(job, job.known)
    status = job.source.stat()
    if job.known is not None and not reason:  # the original may have been touched or moved
        return replace(job.known, source=job.source_name, size=status.st_size, modified=status.st_mtime_ns), reason
    made = compress(job.source, how) if job.video else None
    content = made.content if made else job.source.read_bytes()
    with explain_write_errors(job.target, KEPT):
        job.target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(job.target, content)
    if made is not None:
        try:
            verify_copy(job.target, made)
        except VideoError:
            job.target.unlink()
            raise
    file = CopiedFile(
        job.name,
        job.source_name,
        status.st_size,
        status.st_mtime_ns,
        digest(job.source),
        len(content),
        hashlib.sha256(content).hexdigest(),
        made.frames if made else 0,
        made.notes if made else [],
    )
    if file.has_changed(job.source):
        raise VideoError(job.source, "it changed while it was copied")
    return file, reason


def _difference(job: CopyJob, known: CopiedFile) -> str:
    """Return the reason why an existing copy is incomplete or differs from its source; empty if it does not."""
    if not job.target.is_file():
        return "it was missing"
    if job.target.stat().st_size != known.copy_size or digest(job.target) != known.copy_sha256:
        return "it had changed"
    same = known.source == job.source_name and not known.has_changed(job.source)
    return "" if same or digest(job.source) == known.sha256 else f"its source {job.source} has changed"


def digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
