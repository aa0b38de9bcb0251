"""Compressed copies of datasets for training (`tvr data compress`): smaller videos with the same annotation files."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

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


@dataclass
class CompressReport:
    """Result of copying a dataset.

    Attributes:
        copies: Manifest of the copies.
        root: Value of `data.init_args.root` for training on the copies.
        new: Number of newly copied files.
        kept: Number of existing copies that are complete and match their source.
        redone: Existing copies that were replaced, each with the reason.
        notes: Differences between copies and their originals.
        unread: Unreadable videos, which have no copy, each with the reason.
    """

    copies: Copies
    root: Path
    new: int = 0
    kept: int = 0
    redone: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a summary for the user, one line per item."""
        files = self.copies.files.values()
        size, original = sum(file.copy_size for file in files), sum(file.size for file in files)
        share = f"{size / 1e6:,.1f} MB of {original / 1e6:,.1f} MB"
        return [
            f"copied {self.new} files, kept {self.kept} ({share}) in {self.copies.folder}",
            *(f"copied again: {line}" for line in self.redone),
            *(f"note: {line}" for line in self.notes),
            *(f"skipped: {line}" for line in self.unread),
            f"next: train with --data.init_args.root={self.root}",
        ]


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
    header = Copies(folder, source, how).header()
    with Journal.open(folder / MANIFEST, header, f"the copies in {folder}") as journal:
        copies = read_copies(folder)
        assert copies is not None
        if (copies.how, copies.source) != (how, source):
            raise UserError(
                f"{folder} contains copies {copies.how.describe()}, {copies.how.interpolation}, not {how.describe()}, "
                f"{how.interpolation}, or copies of {copies.source}, not of {source}. Choose another --out, or resume "
                "with the same options."
            )
        names = _files(data)
        report = CompressReport(copies, out)
        read = partial(copy_file, data.folder, copies, names)
        found = read_many([[name] for name in names], read, list, workers=0 if workers == 1 else workers)
        with progress_bar(progress) as bar:
            results = bar.track(found, total=len(names), description=f"copying, {how.describe()}")
            for name, (result,) in zip(names, results, strict=True):
                if isinstance(result, Unread):
                    report.unread.append(f"{names[name]}: {result.reason}")
                    continue
                file, reason = result
                if file != copies.files.get(name):
                    journal.append(asdict(file))
                    copies.files[name] = file
                report.kept, report.new = report.kept + (reason == ""), report.new + (reason != "")
                if reason:
                    report.redone.append(f"{folder / name}: {reason}")
                report.notes += [f"{names[name]}: {note}" for note in file.notes]
        journal.rewrite(asdict(file) for file in copies.files.values())
    return report


def _files(data: TextVideoDataModule) -> dict[str, Path]:
    """Return the annotation files and the videos of all splits by the path of their copy."""
    data = copy.copy(data)  # all training videos are copied, including those that a recipe holds out or does not sample
    data.holdout, data.max_train_videos, data._read = 0, None, {}
    files = {path for name in data.official_splits for path in data.required_files(name)}
    if data.extra_captions is not None:
        files.add(find_captions(data.extra_captions, data.folder))
    if data.warnings:
        files.add(data.folder / SYNTHETIC_FILE)
    inside = [file for file in sorted(files) if file.resolve().is_relative_to(data.folder.resolve())]
    names = {file.relative_to(data.folder).as_posix(): file for file in inside}
    for video in (video.path for name in data.official_splits for video in data.read_split(name).videos):
        name = video.relative_to(data.folder).with_suffix(".mp4").as_posix()
        other = names.setdefault(name, video)
        if other != video:
            raise UserError(f"{other} and {video} would both become {name}. Rename one of them.")
    return names


def copy_file(folder: Path, copies: Copies, names: Mapping[str, Path], name: str) -> tuple[CopiedFile, str | None]:
    """Copy the file `names[name]` of `folder` to `name` unless its copy is up to date.

    Return its entry in the manifest and the reason for copying it again: None for a new copy, empty if the existing
    copy was kept. Raise VideoError if a video cannot be read.
    """
    source, target, known = names[name], copies.folder / name, copies.files.get(name)
    if not source.is_file():
        raise VideoError(source, "there is no such file")
    status = source.stat()
    original: dict[str, Any] = {
        "source": source.relative_to(folder).as_posix(),
        "size": status.st_size,
        "modified": status.st_mtime_ns,
    }
    reason = None
    if known is not None:
        same = known.source == original["source"] and not known.has_changed(source)
        if not target.is_file():
            reason = "it was missing"
        elif target.stat().st_size != known.copy_size or digest(target) != known.copy_sha256:
            reason = "it had changed"
        elif not same and digest(source) != known.sha256:
            reason = f"its source {source} has changed"
        else:  # the original may have been touched or moved
            return replace(known, **original), ""
    made = compress(source, copies.how) if name.endswith(".mp4") else None
    content = made.content if made else source.read_bytes()
    with explain_write_errors(target, KEPT):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content)
    if made is not None:
        try:
            verify_copy(target, made)
        except VideoError:
            target.unlink()
            raise
    file = CopiedFile(
        copy=name,
        sha256=digest(source),
        copy_size=len(content),
        copy_sha256=hashlib.sha256(content).hexdigest(),
        frames=made.frames if made else 0,
        notes=made.notes if made else [],
        **original,
    )
    if file.has_changed(source):
        raise VideoError(source, "it changed while it was copied")
    return file, reason


def digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
