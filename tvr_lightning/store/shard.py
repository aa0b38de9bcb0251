"""A shard of a feature store: one safetensors file that describes its own content.

A store is a folder of shards named `<part>-<number>-<digest>.safetensors`. The parts are "text", "frames", "patches",
and "audio". The tensors of a shard contain its n items in order: "sentence" (n, D) and "words" (n, W, D), or a tensor
named after the part, (n, F, D) or for patches (n, F, P, D); and "mask" (n, W) or (n, F). The header contains, as JSON
under the key "tvr", the items, the skipped items, and the fingerprint of the features. The digest covers the whole
file, so that any changed byte is detected. Files are written atomically.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.ranges import StoreDtype

Part = Literal["text", "frames", "patches", "audio"]
Span = tuple[float, float] | None
VideoKey = tuple[str, str, Span]
Fingerprint = Mapping[str, str]
FileMark = tuple[int, int, str]
"""Mark that identifies a file: its size in bytes, its modification time in ns, and a digest of its content."""

PARTS: tuple[Part, ...] = get_args(Part)
FORMAT = 3
FINGERPRINT_FIELDS = ("encoder", "weights", "sampling", "preprocessing")
NAME = re.compile(rf"(?P<part>{'|'.join(PARTS)})-(?P<number>\d{{5,}})-(?P<digest>[0-9a-f]{{32}})\.safetensors")
SAMPLED_BYTES = 2**16


class StoreError(UserError):
    """A feature store that is missing, damaged, incomplete, or made with other settings. The message names the fix."""

    exit_status = 2


def text_id(text: str) -> str:
    """Return the ID under which a text's features are stored: a digest of its characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_mark(path: str | Path) -> FileMark | None:
    """Return the mark that identifies a file, or None if the file does not exist.

    The digest covers the size and up to 64 KiB each at the beginning, in the middle, and at the end.
    """
    path = Path(path)
    if not path.is_file():
        return None
    status = path.stat()
    digest = hashlib.sha256(str(status.st_size).encode())
    with path.open("rb") as file:
        for start in (0, status.st_size // 2, status.st_size - SAMPLED_BYTES):
            file.seek(max(start, 0))
            digest.update(file.read(SAMPLED_BYTES))
    return status.st_size, status.st_mtime_ns, digest.hexdigest()[:32]


def is_same_file(path: str | Path, mark: FileMark | None, copies: bool = True) -> bool:
    """Return whether a file is the marked one.

    A file with the same size and modification time counts as the same. If only the time differs, the digests are
    compared.

    Args:
        path: File to compare.
        mark: Mark of the file that was read. None if there was no file.
        copies: Whether a file with another modification time, such as a copy, can be the same.
    """
    path = Path(path)
    if mark is None or not path.is_file():
        return mark is None and not path.is_file()
    status = path.stat()
    if status.st_size != mark[0]:
        return False
    if status.st_mtime_ns == mark[1]:
        return True
    found = file_mark(path) if copies else None
    return found is not None and found[2] == mark[2]


@dataclass(frozen=True)
class StoreItem:
    """One video or text in a shard.

    Attributes:
        dataset, split: Dataset and split of the item.
        id: ID of the video; for a text, its `text_id`.
        path: File of the video; empty for a text.
        span: Start and end of the clip in the file, in seconds.
        text: The text; None for a video.
        file: Mark of the video's file when it was read; None for a text, or if there was no file.
    """

    dataset: str
    split: str
    id: str
    path: str = ""
    span: Span = None
    text: str | None = None
    file: FileMark | None = None

    @staticmethod
    def of_text(text: str, dataset: str, split: str) -> StoreItem:
        """Return the item of a text."""
        return StoreItem(dataset, split, text_id(text), text=text)

    @property
    def key(self) -> Any:
        """Key under which a reader finds the item."""
        return self.id if self.text is not None else (self.dataset, self.id, self.span)


@dataclass
class Record:
    """Description of a shard's content.

    Attributes:
        part: Part that the shard belongs to.
        fingerprint: Fingerprint of the features, by field of `FINGERPRINT_FIELDS`.
        command: Command line that created the shard and can create it again.
        dtype: Data type of the features.
        items: The n items, in the order of the first dimension of the tensors.
        skipped: Items that could not be read, with the reason for each.
    """

    part: Part
    fingerprint: dict[str, str]
    command: str
    dtype: StoreDtype
    items: list[StoreItem] = field(default_factory=list)
    skipped: list[tuple[StoreItem, str]] = field(default_factory=list)


def shard_content(record: Record, tensors: Mapping[str, Tensor], mask: Tensor) -> bytes:
    """Return the bytes of a shard, which depend only on its content.

    Args:
        record: Description of the content.
        tensors: "sentence" (n, D) and "words" (n, W, D), or a tensor named after the part, (n, F, ...).
        mask: Mask (n, W) or (n, F), bool.

    Raises:
        StoreError: Features are NaN, infinite, or too large for the record's dtype.
        UserError: The number of items differs from the number of features.
    """
    rows = {name: len(tensor) for name, tensor in {**tensors, "mask": mask}.items()}
    if record.items and set(rows.values()) != {len(record.items)}:
        raise UserError(f"{record.part}: {len(record.items)} items, but features {rows}; expected one row per item")
    kind = torch.float16 if record.dtype == "float16" else torch.float32
    kept = {"mask": mask.detach().cpu().bool().contiguous()}
    for name, tensor in tensors.items():
        kept[name] = tensor.detach().to("cpu", kind).contiguous()
        if not torch.isfinite(kept[name]).all():
            raise StoreError(
                f"{name}: features are NaN, infinite, or too large for {record.dtype}. Nothing was written."
            )
    header = {**asdict(record), "format": FORMAT}
    # Only one key, since safetensors writes several in an order that changes from process to process.
    return save(kept if record.items else {}, {"tvr": json.dumps(header, ensure_ascii=False)})


def shard_name(part: Part, number: int, content: bytes) -> str:
    """Return the file name of a shard with this content."""
    return f"{part}-{number:05d}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors"


def part_of(path: Path) -> str | None:
    """Return the part that a shard belongs to according to its name, or None for other files."""
    named = NAME.fullmatch(path.name)
    return None if named is None else named["part"]


def read_record(path: Path) -> Record:
    """Return the description of a shard's content without reading its tensors.

    Raises:
        StoreError: The header cannot be read or has another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["tvr"])
        if header.pop("format") != FORMAT:
            raise StoreError(f"{path}: the format is not {FORMAT}, the one that this version reads. Extract again.")
        items = [_item(item) for item in header.pop("items")]
        skipped = [(_item(item), reason) for item, reason in header.pop("skipped")]
        return Record(**header, items=items, skipped=skipped)
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: the shard's header cannot be read ({type(error).__name__}: {error})") from error


def _item(header: dict[str, Any]) -> StoreItem:
    span, file = header.pop("span"), header.pop("file")
    return StoreItem(
        **header,
        span=None if span is None else (span[0], span[1]),
        file=None if file is None else (file[0], file[1], file[2]),
    )


def shard_problem(path: Path) -> str | None:
    """Return a description of the problem with a shard file, or None if its content has the digest in its name."""
    named = NAME.fullmatch(path.name)
    if named is None or not path.is_file():
        return f"{path}: the shard is missing"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest().startswith(named["digest"]):
        return None
    return f"{path}: the shard has changed since it was written; its content has the digest {digest.hexdigest()[:32]}"


def shard_files(folder: Path) -> list[Path]:
    """Return the shards of a store, ordered by part and number.

    Raises:
        StoreError: A link leads out of the folder.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        named = NAME.fullmatch(path.name)
        if named is None:
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise StoreError(
                f"{path} is a link to {path.resolve()}, outside the feature store {folder}. Replace the link with the "
                "file, or extract again with another --out."
            )
        found.append((PARTS.index(named["part"]), int(named["number"]), path))
    return [path for _, _, path in sorted(found)]


def differences(found: Fingerprint, expected: Fingerprint, holder: str = "the store") -> str:
    """Describe the fields of `expected` that differ in a store, with both values. Empty if there are none."""
    return "; ".join(
        f"{name}: {holder} has {found.get(name)!r}, this run {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    )


def check_alike(folder: Path, records: Sequence[Record]) -> None:
    """Check that all shards of a part were created with the same settings.

    Raises:
        StoreError: Two shards have different settings. The message contains the differences.
    """
    first: dict[Part, Record] = {}
    for record in records:
        made = first.setdefault(record.part, record)
        differing = differences(made.fingerprint, record.fingerprint)
        if differing:
            raise StoreError(
                f"{folder} mixes shards of two stores, part {record.part!r}: {differing}. Extract to another folder."
            )
