"""Compressed copies of datasets for training (`tvr data compress`): smaller videos with the same annotation files."""

import copy
import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.copies import MANIFEST, SCHEMA, CopiedFile, Copies, read_copies, state
from tvr_lightning.data.records import SYNTHETIC_FILE
from tvr_lightning.data.recover_captions import find_captions
from tvr_lightning.data.video_files import stem
from tvr_lightning.errors import UserError
from tvr_lightning.files import Journal, explain_write_errors, write_whole
from tvr_lightning.media.compression import Compression, compress, verify_copy
from tvr_lightning.media.container import MediaError, VideoError
from tvr_lightning.media.read_many import read_many
from tvr_lightning.progress import progress_bar


@dataclass
class CompressReport:
    """Result of copying a dataset: numbers of new and of kept copies, and replaced and unread files with the reason.

    `root` is the value of `data.init_args.root` for training on the copies.
    """

    copies: Copies
    root: Path
    new: int = 0
    kept: int = 0
    redone: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a summary for the user, one line per item."""
        files = self.copies.files.values()
        size, original = sum(file.copy_size for file in files), sum(file.size for file in files)
        share = f"{size / 1e6:,.1f} MB of {original / 1e6:,.1f} MB"
        return [
            f"copied {self.new} files, kept {self.kept} ({share}) in {self.copies.folder}",
            *(f"copied again: {line}" for line in self.redone),
            *(f"note: {self.copies.source / file.source}: {note}" for file in files for note in file.notes),
            *(f"skipped: {line}" for line in self.unread),
            f"next: train with --data.init_args.root={self.root}",
        ]


def compress_dataset(data: TextVideoDataModule, out: Path, how: Compression, *, workers: int = 1) -> CompressReport:
    """Copy all videos of a dataset's splits at reduced size, and its annotation files unchanged, in the same layout.

    `out` becomes the `root` of the copies. The same call resumes an interrupted run: existing copies are compared with
    the manifest and with their source, and made again if they differ from either.
    """
    data.check_present()
    target = copy.copy(data)
    target.root = str(out)
    source = data.folder.resolve()
    folder = target.folder
    if folder.resolve() == source:
        raise UserError(f"--out {out} is the folder of the originals. Choose another folder.")
    if read_copies(source) is not None:
        raise UserError(f"{source} already contains copies. Set data.init_args.root to the folder of the originals.")
    header = {"schema": SCHEMA, "source": str(source), "how": asdict(how)}
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
        with progress_bar() as bar:
            results = bar.track(found, total=len(names), description=f"copying, {how.describe()}")
            for name, (result,) in zip(names, results, strict=True):
                if isinstance(result, MediaError):
                    report.unread.append(f"{names[name]}: {result.reason}")
                    continue
                file, reason = result
                if file != copies.files.get(name):
                    journal.append(asdict(file))
                    copies.files[name] = file
                if reason is None:
                    report.kept += 1
                else:
                    report.new += 1
                    report.redone += [f"{folder / name}: {reason}"] if reason else []
        journal.rewrite(asdict(file) for file in copies.files.values())
    return report


def _files(data: TextVideoDataModule) -> dict[str, Path]:
    """Return the annotation files in the folder and the videos of all splits by the path of their copy."""
    data = data.all_videos()
    files = {path for name in data.official_splits for path in data.required_files(name)}
    if data.extra_captions is not None:
        files.add(find_captions(data.extra_captions, data.folder))
    if data.warnings:
        files.add(data.folder / SYNTHETIC_FILE)
    paths = sorted(Path(os.path.relpath(file, data.folder)) for file in files)
    names = {path.as_posix(): data.folder / path for path in paths if path.parts[0] != ".."}
    for video in (video.path for name in data.official_splits for video in data.read_split(name).videos):
        name = video.with_name(f"{stem(video.name)}.mp4").relative_to(data.folder).as_posix()
        other = names.setdefault(name, video)
        if other != video:
            raise UserError(f"{other} and {video} would both become {name}. Rename one of them.")
    return names


def copy_file(folder: Path, copies: Copies, names: Mapping[str, Path], name: str) -> tuple[CopiedFile, str | None]:
    """Copy the file `names[name]` of `folder` to `name` unless its copy is up to date.

    Return its entry in the manifest and the reason for copying it again: empty for a new copy, None if the existing
    copy was kept. Raise VideoError if a video cannot be read.
    """
    source = names[name]
    target = copies.folder / name
    known = copies.files.get(name)
    if not source.is_file():
        raise VideoError(source, "there is no such file")
    relative = source.relative_to(folder).as_posix()
    size, modified = state(source)
    reason = ""
    if known is not None:
        same = known.source == relative and not known.has_changed(source)
        if not target.is_file():
            reason = "it was missing"
        elif digest(target) != known.copy_sha256:
            reason = "it had changed"
        elif not same and digest(source) != known.sha256:
            reason = f"its source {source} has changed"
        else:  # the original may have been touched or moved
            return replace(known, source=relative, size=size, modified=modified), None
    made = compress(source, copies.how) if name.endswith(".mp4") else None
    with explain_write_errors(target, "Earlier copies are kept."):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, made.content if made else source.read_bytes())
    if made is not None:
        try:
            verify_copy(target, made)
        except VideoError:
            target.unlink()
            raise
    notes = made.notes if made else []
    file = CopiedFile(name, relative, size, modified, digest(source), target.stat().st_size, digest(target), notes)
    if file.has_changed(source):
        raise VideoError(source, "it changed while it was copied")
    return file, reason


def digest(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
