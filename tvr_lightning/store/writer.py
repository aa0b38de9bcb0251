"""Writer for feature stores, which stay valid if the process is killed, the disk is full, or a second writer starts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from torch import Tensor

from tvr_lightning.files import TEMPORARY, explain_write_errors, file_lock, write_whole
from tvr_lightning.option_types import StoreDtype
from tvr_lightning.store.shard import (
    Fingerprint,
    Part,
    PartIndex,
    Shard,
    ShardHeader,
    StoreError,
    StoreItem,
    differences,
    find_shards,
    shard_content,
)

LOCK = "writer.lock"
DAMAGED = ".damaged"


class StoreWriter:
    """A feature store opened for writing, by one process at a time. Use it as a context manager.

    Opening checks every shard and removes incomplete files of an interrupted run. Damaged shards are renamed; their
    items count as missing and are written again under the same number.

    Attributes:
        parts: Items of each part that the store contains or that this run writes.
        rewritten: Problems of the damaged shards.

    Args:
        path: Folder of the store, created if it is missing.
        fingerprints: Fingerprint of each part to write: encoder, weights, sampling, preprocessing.
        command: Command that creates and repairs these parts.
        dtype: Data type of the features on disk.

    Raises:
        StoreError: Another process is writing the store, or a part has another fingerprint. The message contains both.
    """

    def __init__(
        self, path: str | Path, fingerprints: Mapping[Part, Fingerprint], command: str, dtype: StoreDtype = "float32"
    ) -> None:
        self.path, self.command = Path(path), command
        self.dtype: StoreDtype = dtype
        self.parts = {part: PartIndex(dict(made), command) for part, made in fingerprints.items()}
        self.rewritten: list[str] = []
        self._lock = ExitStack()

    def __enter__(self) -> StoreWriter:
        """Lock the folder and check its content."""
        with ExitStack() as undo:
            with self._explained(self.path / LOCK):
                self.path.mkdir(parents=True, exist_ok=True)
                undo.enter_context(file_lock(self.path / LOCK, f"the feature store {self.path}", StoreError))
            for file in self.path.glob(f"*{TEMPORARY}"):
                file.unlink()
            for shard in find_shards(self.path):
                self._check(shard)
            self._lock = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock. Appended shards stay."""
        self._lock.close()

    def append(
        self,
        part: Part,
        items: Sequence[StoreItem],
        tensors: Mapping[str, Tensor],
        mask: Tensor,
        skipped: Sequence[tuple[StoreItem, str]] = (),
    ) -> None:
        """Write n items and their tensors (n, ...) as one shard, atomically; `mask` is (n, W) or (n, F).

        Tensors are "sentence" and "words", or one named after the part. `skipped` items have reasons.
        """
        index = self.parts[part]
        header = ShardHeader(part, index.fingerprint, self.command, self.dtype, list(items), list(skipped))
        content = shard_content(header, tensors, mask)
        number = next(i for i in range(len(index.numbers) + 1) if i not in index.numbers)
        if any(item.key in index.marks for item in [*items, *(item for item, _ in skipped)]):
            number = max(index.numbers) + 1  # readers use the last shard that contains an item
        digest = hashlib.sha256(content).hexdigest()[:32]
        file = self.path / f"{part}-{number:05d}-{digest}.safetensors"
        with self._explained(file):
            write_whole(file, content)
        index.add(Shard(file, part, number, digest), header)

    def _check(self, shard: Shard) -> None:
        """Add an existing shard to its part, or rename it if it is damaged."""
        problem = shard.problem()
        if problem:
            aside = shard.path.with_name(shard.path.name + DAMAGED)
            shard.path.replace(aside)
            self.rewritten.append(f"{problem}; kept as {aside.name}")
            return
        header = shard.read_header()
        if header.dtype != self.dtype:
            raise StoreError(
                f"The feature store {self.path} contains {header.dtype}, but this run writes {self.dtype}. Use the "
                "same dtype or another --out."
            )
        index = self.parts.setdefault(header.part, PartIndex(header.fingerprint, header.command))
        differing = differences(header.fingerprint, index.fingerprint)
        if differing:
            raise StoreError(
                f"The feature store {self.path} has other settings, part {header.part!r}: {differing}. Use another "
                "--out, or the options of the store."
            )
        index.add(shard, header)

    def _explained(self, file: Path) -> AbstractContextManager[None]:
        kept = f"The store {self.path} is valid with its earlier content."
        return explain_write_errors(file, kept, f"the command: {self.command}", StoreError)
