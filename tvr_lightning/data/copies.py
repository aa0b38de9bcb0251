"""Manifest of a compressed copy of a dataset (`tvr data compress`), with its settings and files.

In the folder of the dataset, the first line of `compressed.jsonl` contains the settings, and each following line a
`CopiedFile`; the last line for a file is the valid one. A line is written after its copy is complete and verified, so
a file without a line is not a valid copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvr_lightning.data.records import abbreviated
from tvr_lightning.errors import UserError
from tvr_lightning.files import read_journal
from tvr_lightning.media.compression import Compression

MANIFEST = "compressed.jsonl"
SCHEMA = 1


@dataclass(frozen=True)
class CopiedFile:
    """Copied file and its original; paths are relative to the folders of the dataset.

    Attributes:
        copy, source: Paths of the copy and of the original.
        size, modified, sha256: Size in bytes, time of the last change in ns, and digest of the original.
        copy_size, copy_sha256: Size in bytes and digest of the copy.
        frames: Number of frames; 0 for an annotation file.
        notes: Differences from the original, such as truncated audio.
    """

    copy: str
    source: str
    size: int
    modified: int
    sha256: str
    copy_size: int
    copy_sha256: str
    frames: int = 0
    notes: list[str] = field(default_factory=list)

    def has_changed(self, source: Path) -> bool:
        """Return whether an original differs from the manifest; it may also be on another machine."""
        if not source.is_file():
            return False
        status = source.stat()
        return (status.st_size, status.st_mtime_ns) != (self.size, self.modified)


@dataclass
class Copies:
    """Compressed copies in `folder` of the dataset in the folder `source`, by the path of the copy."""

    folder: Path
    source: Path
    how: Compression
    files: dict[str, CopiedFile] = field(default_factory=dict)

    def header(self) -> dict[str, Any]:
        """Return the first line of the manifest."""
        return {"schema": SCHEMA, "source": str(self.source), "how": asdict(self.how)}

    def check(self, paths: Iterable[Path]) -> None:
        """Raise UserError if existing copies differ from the manifest, or their originals have changed since."""
        wrong = [f"{path}: {reason}" for path in paths if (reason := self._problem(path)) is not None]
        if wrong:
            fix = "To copy these again, rerun `tvr data compress` with the same --out."
            raise UserError(f"{abbreviated(wrong)}. {fix}")

    def _problem(self, path: Path) -> str | None:
        file = self.files.get(path.relative_to(self.folder).as_posix())
        if file is None:
            return f"it is not in {MANIFEST}: it was not finished, or was added by hand"
        size = path.stat().st_size
        if size != file.copy_size:
            return f"it has {size:,} bytes, but {file.copy_size:,} were written"
        source = self.source / file.source
        return f"its original {source} has changed since it was copied" if file.has_changed(source) else None


def read_copies(folder: Path) -> Copies | None:
    """Read the manifest of a dataset folder; return None for a folder of originals, which has no manifest."""
    lines, _ = read_journal(folder / MANIFEST)
    if not lines:
        return None
    try:
        header, *entries = lines
        if header["schema"] != SCHEMA:
            raise KeyError(f"schema {header['schema']}, but this version reads {SCHEMA}")
        files = [CopiedFile(**entry) for entry in entries]
        how = Compression(**header["how"])
        return Copies(folder, Path(header["source"]), how, {file.copy: file for file in files})
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({error}). Delete the folder and compress again.") from error
