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
from tvr_lightning.store.feature_store import FileMark, is_same_file

MANIFEST = "compressed.jsonl"
SCHEMA = 3


@dataclass(frozen=True)
class CopiedFile:
    """Copied file and its original; paths are relative to the folders of the dataset.

    `mark` identifies the original and `copy_mark` the copy; `notes` are differences, such as truncated audio.
    """

    copy: str
    source: str
    mark: FileMark
    copy_mark: FileMark
    notes: list[str] = field(default_factory=list)


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
            elif size != file.copy_mark[0]:
                wrong.append(f"{path}: it has {size:,} bytes, but {file.copy_mark[0]:,} were written")
            elif (original := self.source / file.source).is_file() and not is_same_file(original, file.mark):
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
        marks = ("mark", "copy_mark")
        entries = [entry | {name: tuple(entry[name]) for name in marks} for entry in entries]
        files = {entry["copy"]: CopiedFile(**entry) for entry in entries}
        return Copies(folder, Path(header["source"]), Compression(**header["how"]), files)
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({error}). Delete the folder and compress again.") from error
