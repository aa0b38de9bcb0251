"""Manifest of the compressed copies of a dataset, which `tvr data compress` writes and every run checks.

In the folder of the copies, the first line of `compressed.jsonl` contains the settings, and each following line a
`CopiedFile`; the last line for a file is the valid one. A line is written after its copy is complete and verified, so
a file without a line is not a valid copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tvr_lightning.errors import UserError, abbreviated
from tvr_lightning.files import read_journal
from tvr_lightning.media.compression import Compression

MANIFEST = "compressed.jsonl"
SCHEMA = 2


@dataclass(frozen=True)
class CopiedFile:
    """Copied file and its original; paths are relative to the folders of the dataset.

    `size`, `modified` (in ns) and `sha256` are those of the original; `notes` are differences, such as truncated audio.
    """

    copy: str
    source: str
    size: int
    modified: int
    sha256: str
    copy_size: int
    copy_sha256: str
    notes: list[str] = field(default_factory=list)

    def has_changed(self, source: Path) -> bool:
        """Return whether the original, if it is on this machine, differs from the manifest."""
        return source.is_file() and state(source) != (self.size, self.modified)


@dataclass
class Copies:
    """Compressed copies in `folder` of the dataset in the folder `source`, by the path of the copy."""

    folder: Path
    source: Path
    how: Compression
    files: dict[str, CopiedFile]

    def check(self, paths: Iterable[Path]) -> None:
        """Raise UserError if existing copies differ from the manifest, or their originals have changed since."""
        wrong = []
        for path in paths:
            file = self.files.get(path.relative_to(self.folder).as_posix())
            size = path.stat().st_size
            if file is None:
                wrong.append(f"{path}: it is not in {MANIFEST}: it was not finished, or was added by hand")
            elif size != file.copy_size:
                wrong.append(f"{path}: it has {size:,} bytes, but {file.copy_size:,} were written")
            elif file.has_changed(original := self.source / file.source):
                wrong.append(f"{path}: its original {original} has changed since it was copied")
        if wrong:
            fix = "To copy these again, rerun `tvr data compress` with the same --out."
            raise UserError(f"{abbreviated(wrong)}. {fix}")


def read_copies(folder: Path) -> Copies | None:
    """Read the manifest of a dataset folder; return None for a folder of originals, which has no manifest."""
    lines, _ = read_journal(folder / MANIFEST)
    if not lines:
        return None
    header, *entries = lines
    try:
        if header["schema"] != SCHEMA:
            raise KeyError(f"schema {header['schema']}, but this version reads {SCHEMA}")
        files = {entry["copy"]: CopiedFile(**entry) for entry in entries}
        return Copies(folder, Path(header["source"]), Compression(**header["how"]), files)
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({error}). Delete the folder and compress again.") from error


def state(path: Path) -> tuple[int, int]:
    """Return the size and the time of the last change (ns) of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
