"""Writer for feature stores, which stay valid if the process is killed, the disk is full, or a second writer starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tvr_lightning.files import TEMPORARY, held, remedy, write_whole
from tvr_lightning.ranges import StoreDtype
from tvr_lightning.store.shard import (
    NAME,
    Fingerprint,
    Part,
    Record,
    StoreError,
    StoreItem,
    check_alike,
    differences,
    read_record,
    shard_content,
    shard_files,
    shard_name,
    shard_problem,
)

LOCK = "writer.lock"
DAMAGED = ".damaged"


class StoreWriter:
    """A feature store opened for writing, by one process at a time. Use it as a context manager.

    Opening checks every shard and removes incomplete files of an interrupted run. Damaged shards are renamed; their
    items count as missing and are written again under the same number.

    Args:
        path: Folder of the store, created if it is missing.
        fingerprints: Fingerprint of each part to write, by field of `FINGERPRINT_FIELDS`.
        command: Command that creates and repairs these parts.
        dtype: Data type of the features on disk.

    Raises:
        StoreError: Another process is writing the store, or a part has another fingerprint. The message contains both.
    """

    def __init__(
        self, path: str | Path, fingerprints: Mapping[Part, Fingerprint], command: str, dtype: StoreDtype = "float32"
    ) -> None:
        self.path = Path(path)
        self.fingerprints = {part: dict(values) for part, values in fingerprints.items()}
        self.command = command
        self.dtype: StoreDtype = dtype
        self.mended: list[str] = []
        self._lock = contextlib.ExitStack()
        self._numbers: dict[str, set[int]] = {}
        self._done: dict[str, dict[Any, StoreItem]] = {}
        self._skipped: dict[str, dict[Any, StoreItem]] = {}

    def __enter__(self) -> StoreWriter:
        """Lock the folder and check its content."""
        with contextlib.ExitStack() as undo:
            self._guarded(self.path, lambda: self.path.mkdir(parents=True, exist_ok=True))
            busy = StoreError(f"Another process is writing the feature store {self.path}. Wait for it or stop it.")
            advice = "do not start a second tvr extract with the same --out"
            self._guarded(self.path / LOCK, lambda: undo.enter_context(held(self.path / LOCK, busy, advice)))
            self._recover()
            self._lock = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock. Appended shards stay."""
        self._lock.close()

    def done(self, part: Part) -> Mapping[Any, StoreItem]:
        """Return the items that a part contains, by key."""
        return self._done.get(part, {})

    def skipped(self, part: Part) -> Mapping[Any, StoreItem]:
        """Return the items of a part that could not be read, by key."""
        return self._skipped.get(part, {})

    def append(
        self,
        part: Part,
        items: Sequence[StoreItem],
        tensors: Mapping[str, Tensor],
        mask: Tensor,
        skipped: Sequence[tuple[StoreItem, str]] = (),
    ) -> None:
        """Write one shard atomically.

        Args:
            part: Part of the shard.
            items: The n items of the shard; empty if all were skipped.
            tensors: "sentence" (n, D) and "words" (n, W, D), or a tensor named after the part, (n, F, ...).
            mask: Mask (n, W) or (n, F), bool.
            skipped: Items that could not be read, with the reason for each.

        Raises:
            StoreError: The disk is full or not writable. The store stays unchanged.
        """
        record = Record(part, self.fingerprints[part], self.command, self.dtype, list(items), list(skipped))
        content = shard_content(record, tensors, mask)
        numbers = self._numbers.setdefault(part, set())
        number = next(i for i in range(len(numbers) + 1) if i not in numbers)
        if {item.key for item in [*items, *(item for item, _ in skipped)]} & (
            self.done(part).keys() | self.skipped(part).keys()
        ):
            number = max(numbers) + 1  # readers use the last shard that contains an item
        file = self.path / shard_name(part, number, content)
        self._guarded(file, lambda: write_whole(file, content))
        self._take_in(number, record)

    def _take_in(self, number: int, record: Record) -> None:
        self._numbers.setdefault(record.part, set()).add(number)
        done, skipped = self._done.setdefault(record.part, {}), self._skipped.setdefault(record.part, {})
        for item in record.items:
            done[item.key] = item
            skipped.pop(item.key, None)
        for item, _ in record.skipped:
            skipped[item.key] = item
            done.pop(item.key, None)

    def _recover(self) -> None:
        for file in self.path.glob(f"*{TEMPORARY}"):
            file.unlink()
        sound: list[Record] = []
        for file in shard_files(self.path):
            problem = shard_problem(file)
            if problem:
                file.replace(file.with_name(file.name + DAMAGED))
                self.mended.append(f"{problem}; kept as {file.name + DAMAGED}")
                continue
            record, named = read_record(file), NAME.fullmatch(file.name)
            assert named is not None
            self._check(record)
            self._take_in(int(named["number"]), record)
            sound.append(record)
        check_alike(self.path, sound)

    def _check(self, record: Record) -> None:
        """Raise StoreError if a shard was created with other settings than those of this run."""
        if record.dtype != self.dtype:
            raise StoreError(
                f"The feature store {self.path} contains {record.dtype}, but this run writes {self.dtype}. Use the "
                "same dtype or another --out."
            )
        differing = differences(record.fingerprint, self.fingerprints.get(record.part, {}))
        if differing:
            raise StoreError(
                f"The feature store {self.path} has other settings, part {record.part!r}: {differing}. Use another "
                "--out, or the options of the store."
            )

    def _guarded(self, file: Path, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise StoreError(
                f"{file} cannot be written: {error.strerror or error}. The store {self.path} is valid with its earlier "
                f"content. To resume, {remedy(error)} and rerun the command: {self.command}"
            ) from error
