"""Writer for feature stores, which stay valid if the process is killed, the disk is full, or a second writer starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from tvr_lightning.files import TEMPORARY, explain_write_errors, file_lock, write_whole
from tvr_lightning.option_types import StoreDtype
from tvr_lightning.store.shard import (
    FORMAT,
    Fingerprint,
    Part,
    PartIndex,
    Shard,
    ShardHeader,
    StoreError,
    StoreItem,
    find_shards,
)


@dataclass
class StoreWriter:
    """A feature store opened for writing, by one process at a time.

    Attributes:
        path: Folder of the store, created if it is missing.
        command: Command that creates and repairs the parts that this run writes.
        dtype: Data type of the features on disk.
        parts: Items of each part that the store contains or that this run writes.
        rewritten: Problems of the damaged shards.
    """

    path: Path
    command: str
    dtype: StoreDtype
    parts: dict[Part, PartIndex]
    rewritten: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open(
        cls, path: str | Path, fingerprints: Mapping[Part, Fingerprint], command: str, dtype: StoreDtype = "float32"
    ) -> Iterator[StoreWriter]:
        """Lock a store inside the context, check every shard, and remove incomplete files of an interrupted run.

        Damaged shards are renamed; their items count as missing and are written again under the same number.

        Raises:
            StoreError: Another process is writing the store, or it contains a part with another fingerprint.
        """
        path = Path(path)
        writer = cls(path, command, dtype, {part: PartIndex(made, command) for part, made in fingerprints.items()})
        with ExitStack() as stack:
            with writer._explained(path / "writer.lock"):
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(file_lock(path / "writer.lock", f"the feature store {path}", StoreError))
            for file in path.glob(f"*{TEMPORARY}"):
                file.unlink()
            for shard in find_shards(path):
                writer._check(shard)
            yield writer

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
        content = _content(header, tensors, mask)
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
            damaged = shard.path.rename(f"{shard.path}.damaged")
            self.rewritten.append(f"{problem}; kept as {damaged.name}")
            return
        header = shard.read_header()
        if header.dtype != self.dtype:
            raise StoreError(
                f"The feature store {self.path} contains {header.dtype}, but this run writes {self.dtype}. Use the "
                "same dtype or another --out."
            )
        self.parts.setdefault(shard.part, PartIndex(header.fingerprint, header.command)).add(shard, header)

    def _explained(self, file: Path) -> AbstractContextManager[None]:
        kept = f"The store {self.path} is valid with its earlier content."
        return explain_write_errors(file, kept, f"the command: {self.command}", StoreError)


def _content(header: ShardHeader, tensors: Mapping[str, Tensor], mask: Tensor) -> bytes:
    """Return the bytes of a shard, which depend only on its content."""
    rows = {name: len(tensor) for name, tensor in {**tensors, "mask": mask}.items()}
    if header.items and set(rows.values()) != {len(header.items)}:
        raise StoreError(f"{header.part}: {len(header.items)} items, but features {rows}; expected one row per item")
    kept = {"mask": mask.detach().cpu().bool().contiguous()}
    for name, tensor in tensors.items():
        dtype = tensor.dtype if name == "pixels" else getattr(torch, header.dtype)
        kept[name] = tensor.detach().to("cpu", dtype).contiguous()
        if not torch.isfinite(kept[name]).all():
            raise StoreError(
                f"{name}: features are NaN, infinite, or too large for {header.dtype}. Nothing was written."
            )
    # Only one key, since safetensors writes several in an order that changes from process to process.
    described = json.dumps({**asdict(header), "format": FORMAT}, ensure_ascii=False)
    return save(kept if header.items else {}, {"tvr": described})
