"""The files of a feature store: header, manifest, shards, and what is wrong with them.

A store is a folder:

    store.json                        what each part was made with, and the command that made it
    shards/frames-00000.safetensors   one tensor file per part and number
    manifest/frames-00000.parquet     the rows of that shard; it appears after the shard, and makes it count
    manifest.parquet                  all rows, once the store is sealed
    writer.lock                       empty; who writes the store holds a lock on it

Parts are "text" (sentence (n, D), words (R, D)), "frames" (R, D), "patches" (R, P, D) and "audio" (R, D_a); an item
owns a range of the R rows. Files appear whole or not at all, so a reader may run beside a writer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from tvr_lightning.errors import UserError

Part = Literal["text", "frames", "patches", "audio"]
Fingerprint = Mapping[str, str]

PARTS: tuple[Part, ...] = get_args(Part)
FORMAT = 1
HEADER, MANIFEST, MANIFEST_PARTS, SHARDS = "store.json", "manifest.parquet", "manifest", "shards"
LOCK = "writer.lock"
SHARD_NAME = re.compile(rf"({'|'.join(PARTS)})-[0-9]+\.safetensors")
FINGERPRINT_FIELDS = ("encoder", "weights", "sampling", "preprocessing")
SCHEMA = pa.schema(
    [
        ("part", pa.string()),
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("id", pa.string()),
        ("path", pa.string()),
        ("span_start", pa.float64()),
        ("span_end", pa.float64()),
        ("text", pa.string()),
        ("shard", pa.string()),
        ("shard_sha256", pa.string()),
        ("shard_bytes", pa.int64()),
        ("position", pa.int64()),
        ("row_start", pa.int64()),
        ("row_stop", pa.int64()),
        ("mask", pa.list_(pa.bool_())),
        ("dtype", pa.string()),
        *((name, pa.string()) for name in FINGERPRINT_FIELDS),
        ("skipped", pa.string()),
    ]
)


class StoreError(UserError, ValueError):
    """A feature store that is absent, damaged, incomplete, or made for something else; says what mends it."""


def text_id(text: str) -> str:
    """Return the id under which a text's features are kept: a digest of its characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def differences(found: Fingerprint, expected: Fingerprint) -> str:
    """Name the fields of `expected` that a store has otherwise, with both values; empty if there are none."""
    return "; ".join(
        f"{field}: the store has {found.get(field)!r}, this run {value!r}"
        for field, value in expected.items()
        if found.get(field) != value
    )


def own_path(store: Path, folder: str, name: str | None = None) -> Path:
    """Return a place in a store, which someone else may have made, once it is clear that it lies in the store's folder.

    Args:
        store: the store's folder; may itself be a link.
        folder: SHARDS or MANIFEST_PARTS.
        name: of a shard, as a manifest has it; None for the folder itself.

    Raises:
        StoreError: the name is none of a shard, or a link leads out of the store.
    """
    if name is not None and not SHARD_NAME.fullmatch(name):
        raise StoreError(
            f"{store}: the manifest names the shard {name!r}, which is no file name of a shard, such as "
            "frames-00000.safetensors; it is not read. The store is damaged or was tampered with: extract again with "
            "another --out"
        )
    path = store / folder / (name or "")
    real = path.resolve()
    if not real.is_relative_to(store.resolve()):
        raise StoreError(
            f"{path} leads out of the feature store {store}, to {real}; a store holds its own files: put what it leads "
            "to into its place, or extract again with another --out"
        )
    return path


def shard_problem(path: Path, sha256: str, size: int) -> str | None:
    """Say what is wrong with a shard file, or None if its length and checksum are those of the manifest."""
    if not path.is_file():
        return f"{path}: the shard is missing"
    found = path.stat().st_size
    if found != size:
        return f"{path}: the shard has {found} bytes, its manifest says {size}"
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() == sha256:
        return None
    return f"{path}: the shard has the sha256 {digest.hexdigest()}, its manifest says {sha256}"


def read_header(path: Path) -> dict[str, Any]:
    """Return a store's `store.json`: "format", "dtype", and "parts" with "fingerprint" and "command" of each.

    Raises:
        StoreError: there is none, it is no JSON, or it is of another format.
    """
    file = path / HEADER
    if not file.is_file():
        raise StoreError(
            f"no feature store at {path}: {file} is missing; make one with: tvr extract --config ... --out {path}"
        )
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise StoreError(f"{file}: not JSON ({error}); remove the folder and extract again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise StoreError(f"{file}: the store has format {found}, this version reads {FORMAT}; extract again")
    return header


def read_manifest(path: Path, columns: Sequence[str], sealed: bool = True) -> pa.Table:
    """Return the rows of a store, ordered by part and shard; of an unfinished store, those written so far.

    Args:
        path: the store's folder.
        columns: names of the columns to read.
        sealed: whether the one manifest of a sealed store is read where there is one, else those of the shards.

    Raises:
        StoreError: a manifest file cannot be read.
    """
    names = [name for name in SCHEMA.names if name in columns]
    for _ in range(10):  # a writer that unseals or mends the store may remove a file between listing and reading
        try:
            if sealed and (path / MANIFEST).is_file():
                return pq.ParquetFile(path / MANIFEST).read(names)
            files = sorted((path / MANIFEST_PARTS).glob("*.parquet"))
            tables = [pq.ParquetFile(file).read(names) for file in files]
            return pa.concat_tables(tables) if tables else pa.schema([SCHEMA.field(n) for n in names]).empty_table()
        except FileNotFoundError:
            continue
        except pa.ArrowInvalid as error:
            raise StoreError(
                f"{path}: the manifest cannot be read: {error}; extract again with another --out"
            ) from error
    raise StoreError(f"{path}: the manifest changes faster than it can be read; try again when its writer is done")
