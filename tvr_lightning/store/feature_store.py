"""Feature stores of `tvr extract`: reading with memory maps and checks, and writing by one process at a time.

A store is a folder of shards, safetensors files named `<part>-<number>-<digest>.safetensors`. The tensors of a shard
contain its n items in order: "sentence" (n, D) and "words" (n, W, D), or a tensor named after the part: (n, F, D), for
patches (n, F, P, D), for pixels (n, F, 3, S, S) as they were decoded; and "mask" (n, W) or (n, F). Frames that keep
their own size are one tensor (K, 3, H, W) per item, "pixels/0" and so on, with their "times" (n, F). The header
contains, as JSON under the key "tvr", the items, the skipped items, and the fingerprint of the features. The digest
covers the whole file, so that any changed byte is detected. Shards are written atomically: a store stays valid if its
writer is killed or the disk is full, and readers need no lock.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tvr_lightning.errors import UserError
from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.files import TEMPORARY, explain_write_errors, file_lock, write_whole
from tvr_lightning.media.sampling import Span
from tvr_lightning.option_types import FeaturePart, StoreDtype

if TYPE_CHECKING:
    import pandas as pd

VideoKey = tuple[str, str, Span | None]
Fingerprint = Mapping[str, str]
FileMark = tuple[int, int, str]  # size of a file in bytes, modification time in ns, and a digest of its content

PARTS: tuple[FeaturePart, ...] = get_args(FeaturePart)
FORMAT = 3
NAME = re.compile(rf"({'|'.join(PARTS)})-(\d{{5,}})-([0-9a-f]{{32}})\.safetensors")
SAMPLED_BYTES = 2**16


class StoreError(UserError):
    """A feature store that is missing, damaged, incomplete, or made with other settings. The message names the fix."""


def file_mark(path: Path) -> FileMark | None:
    """Return the mark that identifies a file, or None if the file does not exist or cannot be read.

    The digest covers the size and up to 64 KiB each at the beginning, in the middle, and at the end.
    """
    try:
        if not path.is_file():
            return None
        status = path.stat()
        digest = hashlib.sha256(str(status.st_size).encode())
        with path.open("rb") as file:
            for start in (0, status.st_size // 2, status.st_size - SAMPLED_BYTES):
                file.seek(max(start, 0))
                digest.update(file.read(SAMPLED_BYTES))
    except PermissionError:
        return None
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
    span: Span | None = None  # start and end of the clip in the file, in seconds
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

    part: FeaturePart
    fingerprint: Fingerprint  # encoder, weights, sampling, and preprocessing of the features
    command: str  # command line that created the shard and can create it again
    dtype: StoreDtype
    items: list[StoreItem]  # n items, in the order of the first dimension of the tensors
    skipped: list[tuple[StoreItem, str]]  # items that could not be read, with the reason for each


@dataclass(frozen=True)
class Shard:
    """File of a shard, and what its name contains: part, number, and digest of the content."""

    path: Path
    part: FeaturePart
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

    @cached_property
    def problem(self) -> str | None:
        """Description of the problem with the file, or None if its content has the digest in its name."""
        try:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        except FileNotFoundError:
            return f"{self.path}: the shard is missing"
        if digest == self.digest:
            return None
        return f"{self.path}: the shard has changed since it was written; its content has the digest {digest}"


def _item(header: dict[str, Any]) -> StoreItem:
    header |= {name: header[name] and tuple(header[name]) for name in ("span", "file")}
    return StoreItem(**header)


def find_shards(folder: Path) -> list[Shard]:
    """Return the shards of a store, ordered by part and number; refuse links that lead out of its folder."""
    shards = []
    for path in folder.glob("*.safetensors"):
        if named := NAME.fullmatch(path.name):
            if not path.resolve().is_relative_to(folder.resolve()):
                raise StoreError(
                    f"{path} is a link to {path.resolve()}, outside the feature store {folder}. Replace the link with "
                    "the file, or extract again with another --out."
                )
            shards.append(Shard(path, cast(FeaturePart, named[1]), int(named[2]), named[3]))
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
        if differing := differences(shard.header.fingerprint, self.fingerprint):
            raise StoreError(
                f"{shard.path} has other settings, part {shard.part!r}: {differing}. Use another --out, or the options "
                "of the store."
            )
        self.numbers.add(shard.number)
        for row, item in enumerate(shard.header.items):
            self.places[item.key] = (shard, row)
            self.marks[item.key] = item.file
            self.skipped.pop(item.key, None)
        for item, reason in shard.header.skipped:
            self.skipped[item.key] = reason
            self.marks[item.key] = item.file
            self.places.pop(item.key, None)


class FeatureStore:
    """A feature store opened for reading. Shards are memory-mapped and can be read from several processes.

    If the header of a shard cannot be read, its items count as missing; the other shards can still be read.

    Args:
        path: Folder of the store.
        parts: Parts to open. The shards of other parts are ignored.

    Raises:
        StoreError: There is no store, or it mixes the shards of two stores. Methods raise it if a part or an item is
            missing, or a shard is damaged.
    """

    def __init__(self, path: str | Path, parts: Sequence[FeaturePart] = PARTS) -> None:
        self.path = Path(path)
        self._shards: list[Shard] = []
        self._parts: dict[FeaturePart, PartIndex] = {}
        self._damaged: dict[Shard, str] = {}
        self._opened: dict[Shard, Any] = {}
        shards = find_shards(self.path)
        if not shards:
            raise StoreError(
                f"{self.path} is not a feature store, since it contains no shards. Create one with: tvr extract "
                f"--config ... --out {self.path}"
            )
        for shard in shards:
            if shard.part in parts:
                try:
                    header = shard.header
                except StoreError as error:
                    self._damaged[shard] = str(error)
                else:
                    self._shards.append(shard)
                    self._parts.setdefault(shard.part, PartIndex(header.fingerprint, header.command)).add(shard)
        self._hint = f" (damaged: {'; '.join(self._damaged.values())})" if self._damaged else ""

    def __getstate__(self) -> dict[str, Any]:
        """Drop the open files, since each process maps the shards itself."""
        return {**self.__dict__, "_opened": {}}

    @property
    def parts(self) -> list[FeaturePart]:
        """Parts that the store contains."""
        return list(self._parts)

    def __len__(self) -> int:
        """Return the number of videos."""
        return max((len(index.places) for part, index in self._parts.items() if part != "text"), default=0)

    def skipped(self, part: FeaturePart) -> dict[Any, str]:
        """Return the items that extraction skipped, with the reason for each."""
        return self._part(part).skipped

    def table(self) -> pd.DataFrame:
        """Return one row per item and part; the span is in seconds."""
        import pandas as pd  # takes half a second, which training and search do not need

        rows: list[dict[str, Any]] = []
        for shard in self._shards:
            header = shard.header
            of_shard = {"part": header.part, "shard": shard.path.name, "dtype": header.dtype, **header.fingerprint}
            rows += [{**vars(item), **of_shard, "row": row} for row, item in enumerate(header.items)]
            rows += [{**vars(item), **of_shard, "skipped": reason} for item, reason in header.skipped]
        for described in rows:
            described["span_start"], described["span_end"] = described["span"] or (None, None)
        columns = ["part", "dataset", "split", "id", "path", "span_start", "span_end", "text", "shard", "row", "dtype"]
        return pd.DataFrame(rows, columns=[*columns, "encoder", "weights", "sampling", "preprocessing", "skipped"])

    def require(self, part: FeaturePart, expected: Fingerprint) -> None:
        """Raise StoreError unless a part has this fingerprint; `expected` may omit fields."""
        if differing := differences(self._part(part).fingerprint, expected):
            raise StoreError(
                f"The feature store {self.path} does not fit this run, since its part {part!r} has other settings: "
                f"{differing}. Set the run's options to the store's, or write another store with tvr extract --out"
            )

    def require_items(self, part: FeaturePart, files: Mapping[Any, Path | None]) -> None:
        """Raise StoreError unless a part contains or skipped all of these items, given with their current files.

        A file that is None or does not exist on this machine is not compared with the one that was read.
        """
        index = self._part(part)
        if absent := [key for key in files if key not in index.marks]:
            raise StoreError(
                f"{len(absent)} of {len(files)} items of part {part!r} are missing in the feature store {self.path}, "
                f"first {_name(absent[0])}{self._hint}. Complete it with: {index.command}"
            )
        marked = [key for key in files if index.marks[key] is not None or key in index.skipped]
        present = [(key, file) for key in marked if (file := files[key]) is not None and file.is_file()]
        if changed := [file for key, file in present if not is_same_file(file, index.marks[key])]:
            raise StoreError(
                f"{len(changed)} of {len(files)} videos are not the files whose {part} the feature store {self.path} "
                f"contains, first {changed[0]}. Extract them again with: {index.command}"
            )

    def verify(self) -> None:
        """Raise StoreError unless the header of every shard can be read, and its content has the digest in its name."""
        for shard in [*self._damaged, *self._shards]:
            self._check(shard)

    def text(self, texts: Sequence[str]) -> TextFeatures:
        """Return the features of N texts: sentence (N, D), words (N, W, D), word_mask (N, W), float32."""
        sentence, words, mask = self.read("text", texts)
        return TextFeatures(sentence.float(), words.float(), mask)

    def video(self, keys: Sequence[VideoKey], patches: bool = False) -> VideoFeatures:
        """Return the features of M videos: frames (M, F, D), frame_mask (M, F), and audio if stored, float32.

        Keys are (dataset, video ID, span); with `patches`, the patch vectors (M, F, P, D) are included.
        """
        frames, mask = self.read("frames", keys)
        features = VideoFeatures(frames.float(), mask)
        if patches:
            features.patches = self.read("patches", keys)[0].float()
        if "audio" in self._parts:
            audio, features.audio_mask = self.read("audio", keys)
            features.audio = audio.float()
        return features

    def read(self, part: FeaturePart, keys: Sequence[Any]) -> list[Tensor]:
        """Return the tensors of items as they are stored: for M videos, values (M, F, ...) and their mask (M, F)."""
        return [torch.stack(rows) for rows in zip(*(self.item(part, key) for key in keys), strict=True)]

    def item(self, part: FeaturePart, key: Any) -> list[Tensor]:
        """Return the tensors of one item: (F, ...) and their mask (F,), and the times (F,) of frames of any size."""
        index = self._part(part)
        if key not in index.places:
            reason = f"it was skipped: {index.skipped[key]}" if key in index.skipped else "it is missing"
            raise StoreError(f"the feature store {self.path} has no features of {_name(key)}: {reason}{self._hint}")
        shard, row = index.places[key]
        if shard not in self._opened:
            self._check(shard)
            self._opened[shard] = safe_open(shard.path, framework="pt")
        opened = self._opened[shard]
        names = ("sentence", "words", "mask") if part == "text" else (part, "mask")
        if part == "pixels" and "times" in opened.keys():  # noqa: SIM118  not a dict
            return [opened.get_tensor(f"{part}/{row}"), *(opened.get_slice(name)[row] for name in ("mask", "times"))]
        return [opened.get_slice(name)[row] for name in names]

    def first_video(self, patches: bool = False) -> VideoFeatures:
        """Return the features of the first video, which show the shapes of others."""
        index = self._part("frames")
        if not index.places:
            raise StoreError(f"The feature store {self.path} contains no videos. It was created with: {index.command}")
        return self.video([next(iter(index.places))], patches)

    def _part(self, part: FeaturePart) -> PartIndex:
        if part not in self._parts:
            raise StoreError(
                f"The feature store {self.path} has no part {part!r}, only {', '.join(self._parts) or 'nothing yet'}"
                f"{self._hint}. Add it with: tvr extract --config ... --parts {part} --out {self.path}"
            )
        return self._parts[part]

    def _check(self, shard: Shard) -> None:
        if problem := self._damaged.get(shard) or shard.problem:
            index = self._parts.get(shard.part)
            command = index.command if index else f"tvr extract --config ... --out {self.path}"
            raise StoreError(f"{problem}. Rewrite it, and keep the rest, with: {command}")


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    _, name, span = key
    return name if span is None else f"{name} ({span[0]:g} to {span[1]:g} s)"


@dataclass
class StoreWriter:
    """A feature store opened for writing, by one process at a time."""

    path: Path
    command: str  # command that creates and repairs the parts that this run writes
    dtype: StoreDtype
    parts: dict[FeaturePart, PartIndex]  # that the store contains or that this run writes
    rewritten: list[str] = field(default_factory=list)  # problems of the damaged shards

    @classmethod
    @contextmanager
    def open(
        cls,
        path: str | Path,
        fingerprints: Mapping[FeaturePart, Fingerprint],
        command: str,
        dtype: StoreDtype = "float32",
    ) -> Iterator[StoreWriter]:
        """Lock a store inside the context, check every shard, and remove incomplete files of an interrupted run.

        Damaged shards are renamed; their items count as missing and are written again under the same number.

        Raises:
            StoreError: Another process is writing the store, or it contains a part with another fingerprint.
        """
        path = Path(path)
        writer = cls(path, command, dtype, {part: PartIndex(made, command) for part, made in fingerprints.items()})
        lock = path / "writer.lock"
        with ExitStack() as stack:
            with writer._explained(lock):
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(file_lock(lock, f"the feature store {path}", StoreError))
            for file in path.glob(f"*{TEMPORARY}"):
                file.unlink()
            for shard in find_shards(path):
                if problem := shard.problem:
                    damaged = shard.path.rename(f"{shard.path}.damaged")
                    writer.rewritten.append(f"{problem}; kept as {damaged.name}")
                    continue
                header = shard.header
                if header.dtype != dtype:
                    raise StoreError(
                        f"The feature store {path} contains {header.dtype}, but this run writes {dtype}. Use the same "
                        "dtype or another --out."
                    )
                writer.parts.setdefault(shard.part, PartIndex(header.fingerprint, header.command)).add(shard)
            yield writer

    def append(
        self,
        part: FeaturePart,
        items: Sequence[StoreItem],
        tensors: Mapping[str, Tensor | list[Tensor]],
        mask: Tensor,
        skipped: Sequence[tuple[StoreItem, str]] = (),
    ) -> None:
        """Write n items and their tensors (n, ...) as one shard, atomically; `mask` is (n, W) or (n, F).

        Tensors are "sentence" and "words", or one named after the part; frames of any size are a list of n tensors,
        with "times". `skipped` items have reasons.
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
        index.add(Shard(file, part, number, digest))

    def _explained(self, file: Path) -> AbstractContextManager[None]:
        kept = f"The store {self.path} is valid with its earlier content."
        return explain_write_errors(file, kept, f"the command: {self.command}")


def _content(header: ShardHeader, tensors: Mapping[str, Tensor | list[Tensor]], mask: Tensor) -> bytes:
    """Return the bytes of a shard, which depend only on its content."""
    rows = {name: len(tensor) for name, tensor in {**tensors, "mask": mask}.items()}
    if header.items and set(rows.values()) != {len(header.items)}:
        raise StoreError(f"{header.part}: {len(header.items)} items, but features {rows}; expected one row per item")
    kept = {"mask": mask.detach().cpu().bool().contiguous()}
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        named |= {name: value} if isinstance(value, Tensor) else {f"{name}/{i}": item for i, item in enumerate(value)}
    for name, tensor in named.items():
        dtype = tensor.dtype if header.part == "pixels" else getattr(torch, header.dtype)
        kept[name] = tensor.detach().to("cpu", dtype).contiguous()
        if not torch.isfinite(kept[name]).all():
            raise StoreError(
                f"{name}: features are NaN, infinite, or too large for {header.dtype}. Nothing was written."
            )
    # Only one key, since safetensors writes several in an order that changes from process to process.
    described = json.dumps({**asdict(header), "format": FORMAT}, ensure_ascii=False)
    return save(kept if header.items else {}, {"tvr": described})
