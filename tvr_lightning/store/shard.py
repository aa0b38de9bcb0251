"""A shard of a feature store: one safetensors file that describes its own content.

A store is a folder of shards named `<part>-<number>-<digest>.safetensors`. The tensors of a shard contain its n items
in order: "sentence" (n, D) and "words" (n, W, D), or a tensor named after the part: (n, F, D), for patches
(n, F, P, D), for pixels (n, F, 3, S, S) as they were decoded; and "mask" (n, W) or (n, F). The header contains, as JSON
under the key "tvr", the items, the skipped items, and the fingerprint of the features. The digest covers the whole
file, so that any changed byte is detected. Files are written atomically.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

from safetensors import SafetensorError, safe_open

from tvr_lightning.errors import UserError
from tvr_lightning.option_types import StoreDtype

Part = Literal["text", "frames", "patches", "audio", "pixels"]
Span = tuple[float, float] | None
VideoKey = tuple[str, str, Span]
Fingerprint = Mapping[str, str]
FileMark = tuple[int, int, str]  # size of a file in bytes, modification time in ns, and a digest of its content

PARTS: tuple[Part, ...] = get_args(Part)
FORMAT = 3
NAME = re.compile(rf"({'|'.join(PARTS)})-(\d{{5,}})-([0-9a-f]{{32}})\.safetensors")
SAMPLED_BYTES = 2**16


class StoreError(UserError):
    """A feature store that is missing, damaged, incomplete, or made with other settings. The message names the fix."""

    exit_status = 2


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


def is_same_file(path: Path, mark: FileMark | None) -> bool:
    """Return whether an existing file has this mark: its size and modification time, or the digest, as copies have."""
    if mark is None:
        return False
    status = path.stat()
    found = file_mark(path) if (status.st_size, status.st_mtime_ns) != mark[:2] else mark
    return found is not None and found[2] == mark[2]


@dataclass(frozen=True)
class StoreItem:
    """One video or text in a shard."""

    dataset: str
    split: str
    id: str  # of the video; for a text, a digest of its characters
    path: str = ""  # of the video; empty for a text
    span: Span = None  # start and end of the clip in the file, in seconds
    text: str | None = None  # None for a video
    file: FileMark | None = None  # mark of the video's file when it was read; None for a text or a missing file

    @staticmethod
    def of_text(text: str, dataset: str, split: str) -> StoreItem:
        """Return the item of a text."""
        return StoreItem(dataset, split, hashlib.sha256(text.encode()).hexdigest()[:32], text=text)

    @property
    def key(self) -> Any:
        """Key under which a reader finds the item: its text, or dataset, ID, and span of a video."""
        return (self.dataset, self.id, self.span) if self.text is None else self.text


@dataclass
class ShardHeader:
    """Description of a shard's content."""

    part: Part
    fingerprint: Fingerprint  # encoder, weights, sampling, and preprocessing of the features
    command: str  # command line that created the shard and can create it again
    dtype: StoreDtype
    items: list[StoreItem]  # n items, in the order of the first dimension of the tensors
    skipped: list[tuple[StoreItem, str]]  # items that could not be read, with the reason for each


@dataclass(frozen=True)
class Shard:
    """File of a shard, and what its name contains: part, number, and digest of the content."""

    path: Path
    part: Part
    number: int
    digest: str

    @cached_property
    def header(self) -> ShardHeader:
        """Description of the content, read without the tensors. StoreError if that is impossible."""
        try:
            with safe_open(self.path, framework="pt") as file:
                header = json.loads(file.metadata()["tvr"])
            if header.pop("format") != FORMAT:
                raise StoreError(f"{self.path}: the format is not {FORMAT}, which this version reads. Extract again.")
            items = [_item(item) for item in header.pop("items")]
            skipped = [(_item(item), reason) for item, reason in header.pop("skipped")]
            return ShardHeader(**header, items=items, skipped=skipped)
        except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(f"{self.path}: the shard's header cannot be read ({reason})") from error

    def problem(self) -> str | None:
        """Return a description of the problem with the file, or None if its content has the digest in its name."""
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        except FileNotFoundError:
            return f"{self.path}: the shard is missing"
        if digest == self.digest:
            return None
        return f"{self.path}: the shard has changed since it was written; its content has the digest {digest}"


def _item(header: dict[str, Any]) -> StoreItem:
    span, file = header.pop("span"), header.pop("file")
    return StoreItem(**header, span=span and tuple(span), file=file and tuple(file))


def find_shards(folder: Path) -> list[Shard]:
    """Return the shards of a store, ordered by part and number; refuse links that lead out of its folder."""
    shards = []
    for path in folder.glob("*.safetensors"):
        named = NAME.fullmatch(path.name)
        if named is None:
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise StoreError(
                f"{path} is a link to {path.resolve()}, outside the feature store {folder}. Replace the link with the "
                "file, or extract again with another --out."
            )
        part, number, digest = named.groups()
        shards.append(Shard(path, cast(Part, part), int(number), digest))
    return sorted(shards, key=lambda shard: (PARTS.index(shard.part), shard.number))


def differences(found: Fingerprint, expected: Fingerprint, holder: str = "the store") -> str:
    """Describe the fields of `expected` that differ in a store, with both values. Empty if there are none."""
    return "; ".join(
        f"{name}: {holder} has {found.get(name)!r}, this run {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    )


@dataclass
class PartIndex:
    """Items of one part of a store, by key. If several shards contain an item, the last one counts."""

    fingerprint: Fingerprint
    command: str  # command that creates and repairs the part
    places: dict[Any, tuple[Shard, int]] = field(default_factory=dict)  # shard and row of each item
    skipped: dict[Any, str] = field(default_factory=dict)  # reason for each skipped item
    marks: dict[Any, FileMark | None] = field(default_factory=dict)  # also of skipped items
    numbers: set[int] = field(default_factory=set)  # of the shards

    def add(self, shard: Shard) -> None:
        """Add the items of a shard; raise StoreError if it was created with other settings."""
        differing = differences(shard.header.fingerprint, self.fingerprint)
        if differing:
            raise StoreError(
                f"{shard.path} has other settings, part {shard.part!r}: {differing}. Use another --out, or the options "
                "of the store."
            )
        self.numbers.add(shard.number)
        for row, item in enumerate(shard.header.items):
            self.places[item.key], self.marks[item.key] = (shard, row), item.file
            self.skipped.pop(item.key, None)
        for item, reason in shard.header.skipped:
            self.skipped[item.key], self.marks[item.key] = reason, item.file
            self.places.pop(item.key, None)
