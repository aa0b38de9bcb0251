"""Writes a feature store: shard by shard, each whole or not at all, so that it may be stopped at any moment."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save
from torch import Tensor

from tvr_lightning.data.store import Span
from tvr_lightning.data.store_format import (
    FORMAT,
    HEADER,
    LOCK,
    MANIFEST,
    MANIFEST_PARTS,
    SCHEMA,
    SHARDS,
    Fingerprint,
    Part,
    StoreError,
    differences,
    own_path,
    read_header,
    read_manifest,
    shard_problem,
    text_id,
)
from tvr_lightning.locks import held

StoreDtype = Literal["float32", "float16"]
TEMPORARY = ".writing"


@dataclass(frozen=True)
class StoreItem:
    """One video or text as the manifest names it.

    Attributes:
        dataset, split: where it is from.
        id: the video's id; for a text, `text_id` of it.
        path: the video's file; empty for a text.
        span: seconds of the clip in the file.
        text: the text itself; None for a video.
    """

    dataset: str
    split: str
    id: str
    path: str = ""
    span: Span = None
    text: str | None = None

    @staticmethod
    def of_text(text: str, dataset: str, split: str) -> StoreItem:
        """Return the item of a text."""
        return StoreItem(dataset, split, text_id(text), text=text)

    @property
    def key(self) -> Any:
        """What a reader looks it up by."""
        return self.id if self.text is not None else (self.dataset, self.id, self.span)


class StoreWriter:
    """A feature store opened for writing, by one process at a time; use it as a context.

    Opening checks every shard, drops what a killed run left half-written, and forgets damaged shards so that their
    items count as missing and are written again under the same number.

    Args:
        path: the store's folder; made if it is not there.
        fingerprints: what each part to be written is made with, by field of `FINGERPRINT_FIELDS`.
        command: the command that makes and mends these parts.
        dtype: of the features on disk.

    Raises:
        StoreError: another process writes the store, a part was made otherwise (both fingerprints are shown), or the
            store names files outside its folder.
    """

    def __init__(
        self, path: str | Path, fingerprints: Mapping[Part, Fingerprint], command: str, dtype: StoreDtype = "float32"
    ) -> None:
        self.path = Path(path)
        self.fingerprints = {part: dict(values) for part, values in fingerprints.items()}
        self.command = command
        self.dtype: StoreDtype = dtype
        self._lock = contextlib.ExitStack()
        self._numbers: dict[str, set[int]] = {}
        self._done: dict[str, set[Any]] = {}
        self.mended: list[str] = []

    def __enter__(self) -> StoreWriter:
        """Lock the folder, check what is there, and write the header."""
        for folder in (SHARDS, MANIFEST_PARTS):
            self._guarded(own_path(self.path, folder), lambda target: target.mkdir(parents=True, exist_ok=True))
        try:
            self._guarded(self.path / LOCK, self._take_lock)
            self._write_header()
            self._recover()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock; what was appended stays."""
        self._lock.close()

    def done(self, part: Part) -> set[Any]:
        """Return the keys of the items that a part holds or has skipped."""
        return self._done.get(part, set())

    def append(
        self,
        part: Part,
        items: Sequence[StoreItem],
        tensors: Mapping[str, Tensor],
        mask: Tensor,
        skipped: Sequence[tuple[StoreItem, str]] = (),
    ) -> None:
        """Write one shard and make it count.

        Args:
            part: which part.
            items: the n items of the shard; may be none when all were skipped.
            tensors: "sentence" (n, D) and "words" (n, W, D); or the part's own name with (n, F, ...).
            mask: (n, W) or (n, F) bool.
            skipped: items that could not be read, each with the reason.

        Raises:
            StoreError: the disk is full or not writable; the store stays as it was before this call.
        """
        self.unseal()
        number = next(i for i in range(len(self._numbers.get(part, ())) + 1) if i not in self._numbers.get(part, ()))
        name = f"{part}-{number:05d}"
        shard, digest, size = None, None, None
        if items:
            shard = f"{name}.safetensors"
            data = save({key: _flat(key, value, self.dtype) for key, value in tensors.items()})
            digest, size = hashlib.sha256(data).hexdigest(), len(data)
            self._write(self.path / SHARDS / shard, data)
        rows = self._rows(part, items, mask, (shard, digest, size), skipped)
        self._write(self.path / MANIFEST_PARTS / f"{name}.parquet", _parquet(rows))
        self._numbers.setdefault(part, set()).add(number)
        self._done.setdefault(part, set()).update(item.key for item in [*items, *(item for item, _ in skipped)])

    def seal(self) -> None:
        """Write the one manifest of all shards: the extraction has come to its end.

        Raises:
            StoreError: the disk is full or not writable.
        """
        file = self.path / MANIFEST
        rows = _parquet(read_manifest(self.path, SCHEMA.names, sealed=False))
        if not file.is_file() or file.read_bytes() != rows:
            self._write(file, rows)

    def unseal(self) -> None:
        """Take back the one manifest before the store changes; readers then read the shards' own."""
        (self.path / MANIFEST).unlink(missing_ok=True)

    def _rows(
        self,
        part: Part,
        items: Sequence[StoreItem],
        mask: Tensor,
        shard: tuple[str | None, str | None, int | None],
        skipped: Sequence[tuple[StoreItem, str]],
    ) -> pa.Table:
        length = mask.shape[1] if mask.ndim == 2 else 0
        rows = []
        for position, item in enumerate([*items, *(item for item, _ in skipped)]):
            row = {name: getattr(item, name) for name in ("dataset", "split", "id", "path", "text")}
            row |= {
                "part": part,
                "dtype": self.dtype,
                **self.fingerprints[part],
            }
            row["span_start"], row["span_end"] = item.span or (None, None)
            if position < len(items):
                row |= {"shard": shard[0], "shard_sha256": shard[1], "shard_bytes": shard[2], "position": position}
                row |= {"row_start": position * length, "row_stop": (position + 1) * length}
                row["mask"] = mask[position].tolist()
            else:
                row["skipped"] = skipped[position - len(items)][1]
            rows.append(row)
        return pa.Table.from_pylist(rows, schema=SCHEMA)

    def _take_lock(self, file: Path) -> None:
        busy = StoreError(f"another process writes the feature store {self.path}; wait for it or stop it")
        self._lock.enter_context(held(file, busy, "start no second tvr extract with the same --out"))

    def _write_header(self) -> None:
        file = self.path / HEADER
        fresh: dict[str, Any] = {"format": FORMAT, "dtype": self.dtype, "parts": {}}
        header = read_header(self.path) if file.is_file() else fresh
        if header["dtype"] != self.dtype:
            raise StoreError(
                f"the feature store {self.path} holds {header['dtype']}, this run writes {self.dtype}; use the same "
                "dtype or another --out"
            )
        parts = dict(header["parts"])
        for part, values in self.fingerprints.items():
            made = parts.setdefault(part, {"fingerprint": values, "command": self.command})
            differing = differences(made["fingerprint"], values)
            if differing:
                raise StoreError(
                    f"the feature store {self.path} was made otherwise, part {part!r}: {differing}. Use another --out, "
                    "or the options of the store"
                )
        header["parts"] = {part: parts[part] for part in sorted(parts)}
        text = json.dumps(header, indent=2, ensure_ascii=False) + "\n"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            self._write(file, text.encode())

    def _recover(self) -> None:
        for folder in (self.path, self.path / SHARDS, self.path / MANIFEST_PARTS):
            for file in folder.glob(f"*{TEMPORARY}"):
                file.unlink()
        known: set[str] = set()
        for file in sorted((self.path / MANIFEST_PARTS).glob("*.parquet")):
            problem = self._adopt(file, known)
            if problem:
                self.mended.append(problem)
                self.unseal()
                file.unlink()
        for file in (self.path / SHARDS).iterdir():
            if file.name not in known:
                file.unlink()

    def _adopt(self, file: Path, known: set[str]) -> str | None:
        """Take the shard of a manifest file into account, or say why it cannot be."""
        try:
            rows = pq.ParquetFile(file).read()
        except pa.ArrowInvalid as error:
            return f"{file}: cannot be read: {error}"
        part, number = file.stem.rsplit("-", 1)
        entries = rows.to_pylist()
        shards = {
            (row["shard"], row["shard_sha256"], row["shard_bytes"]) for row in entries if row["shard"] is not None
        }
        for shard, sha256, size in shards:
            problem = shard_problem(own_path(self.path, SHARDS, shard), sha256, size)
            if problem:
                return problem
            known.add(shard)
        self._numbers.setdefault(part, set()).add(int(number))
        for row in entries:
            span = None if row["span_start"] is None else (row["span_start"], row["span_end"])
            item = StoreItem(row["dataset"], row["split"], row["id"], row["path"], span, row["text"])
            self._done.setdefault(part, set()).add(item.key)
        return None

    def _write(self, file: Path, data: bytes) -> None:
        self._guarded(file, lambda target: write_whole(target, data))

    def _guarded(self, file: Path, write: Any) -> None:
        try:
            write(file)
        except OSError as error:
            raise StoreError(
                f"{file} cannot be written: {error.strerror or error}. The store {self.path} is valid with what it "
                f"held before; {remedy(error)} and run the same command again: {self.command}"
            ) from error


def remedy(error: OSError) -> str:
    """Say what helps where a file could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    return "see that it can be written"


@contextlib.contextmanager
def _removed_on_failure(file: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def write_whole(file: Path, data: bytes) -> None:
    """Write a file so that it appears whole, under its name, and only once it is on the disk.

    Raises:
        OSError: it cannot be written; what had the name before is left as it was.
    """
    temporary = file.with_name(file.name + TEMPORARY)
    with _removed_on_failure(temporary):
        with temporary.open("wb") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    if os.name == "nt":  # where folders cannot be opened
        return
    # The rename itself must reach the disk before the next step counts on it.
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _flat(name: str, tensor: Tensor, dtype: StoreDtype) -> Tensor:
    """Join the items of a tensor into rows: (n, F, ...) to (n * F, ...); sentences (n, D) stay."""
    kind = torch.float16 if dtype == "float16" else torch.float32
    tensor = tensor.detach().to("cpu", kind)
    if not torch.isfinite(tensor).all():
        raise StoreError(f"{name}: features are NaN, infinite, or too large for {dtype}; nothing was written")
    return (tensor if name == "sentence" else tensor.flatten(0, 1)).contiguous()


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())
