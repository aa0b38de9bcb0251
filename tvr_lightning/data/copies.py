"""The manifest of a dataset of small copies (`tvr data compress`): how they were made, and of which files.

In a dataset's folder, the first line of `compressed.jsonl` says how, each further one is a `CopiedFile`; of several
lines of one file the last one holds. A line is written when its copy is whole and verified: a file without one is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvr_lightning.errors import UserError
from tvr_lightning.media.compression import Compression

MANIFEST = "compressed.jsonl"
SCHEMA = 1
_SHOWN = 5


@dataclass(frozen=True)
class CopiedFile:
    """A copy and what it was made of.

    Attributes:
        copy: its path below the dataset's folder of copies. source: that of the original below its own.
        size, modified, sha256: bytes, time of the last change in ns, and digest of the original.
        copy_size, copy_sha256: bytes and digest of the copy.
        frames: how many; 0 of an annotation file.
        notes: what is not as in the original, such as sound that breaks off.
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


@dataclass
class Copies:
    """A manifest.

    Attributes:
        folder: of the dataset's copies.
        source: the dataset's folder that they were made from.
        how: how they were made.
        files: by the path of the copy below `folder`.
        length: bytes of the manifest's whole lines.
    """

    folder: Path
    source: Path
    how: Compression
    files: dict[str, CopiedFile] = field(default_factory=dict)
    length: int = 0

    def header(self) -> dict[str, Any]:
        """Return the manifest's first line."""
        return {"schema": SCHEMA, "source": str(self.source), "how": asdict(self.how)}

    def check(self, paths: Iterable[Path]) -> None:
        """Compare copies that are there with the manifest, and their originals, where these are there, too.

        Raises:
            UserError: a copy is not the one that was written and verified, or its original has changed since.
        """
        wrong = []
        for path in paths:
            name = path.relative_to(self.folder).as_posix()
            reason = self._stale(path, self.files.get(name))
            if reason is not None:
                wrong.append(f"{path}: {reason}")
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            fix = "To copy these again, rerun `tvr data compress` with the same --out."
            raise UserError(f"{'; '.join(wrong[:_SHOWN])}{more}. {fix}")

    def _stale(self, path: Path, file: CopiedFile | None) -> str | None:
        if file is None:
            return f"it is not in {MANIFEST}: it was not finished, or was added by hand"
        size = path.stat().st_size
        if size != file.copy_size:
            return f"it has {size:,} bytes, but {file.copy_size:,} were written"
        source = self.source / file.source
        if changed(source, file):
            return f"its original {source} has changed since it was copied"
        return None


def changed(source: Path, file: CopiedFile) -> bool:
    """Whether an original that is there has another size or time of change than when it was copied."""
    try:
        found = source.stat()
    except OSError:  # the copies may be on another machine than the originals
        return False
    return (found.st_size, found.st_mtime_ns) != (file.size, file.modified)


def read_copies(folder: Path) -> Copies | None:
    """Read the manifest of a dataset's folder; None where there is none, so that its videos are originals.

    Raises:
        UserError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    content = path.read_bytes()
    length = content.rfind(b"\n") + 1  # a kill may leave a part of a line behind
    lines = content[:length].splitlines()
    try:
        header = json.loads(lines[0])
        if header["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {header['schema']}, but this version reads {SCHEMA}. Compress again.")
        copies = Copies(folder, Path(header["source"]), Compression(**header["how"]), length=length)
        for line in lines[1:]:
            file = CopiedFile(**json.loads(line))
            copies.files[file.copy] = file
    except (IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({error}). Delete the folder and compress again.") from error
    return copies
