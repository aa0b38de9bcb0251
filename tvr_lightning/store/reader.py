"""Reads a feature store that `tvr extract` wrote: memory-mapped, checked, safe beside a writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.store.shard import (
    FINGERPRINT_FIELDS,
    MANIFEST,
    PARTS,
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

Span = tuple[float, float] | None
VideoKey = tuple[str, str, Span]

READ_COLUMNS = [name for name in SCHEMA.names if name not in (*FINGERPRINT_FIELDS, "dtype", "text", "path", "split")]


@dataclass(frozen=True)
class Shard:
    """One shard of one part, as iterated.

    Attributes:
        ids: of its n items: video ids, or digests of the texts.
        tensors: "sentence" (n, D) and "words" (n, W, D); or "frames" (n, F, D), "patches" (n, F, P, D), "audio".
        mask: (n, W) or (n, F) bool.
    """

    ids: list[str]
    tensors: dict[str, Tensor]
    mask: Tensor


@dataclass
class _Rows:
    """Where the items of one part are: index i of every field belongs to item i.

    Attributes:
        place: item of every key.
        shard: file name of each item's shard.
        rows: (n, 2) first and one-past-last row in the shard.
        position: (n,) number of the item in its shard.
        masks: all masks one after another, bool; item i's begins at `mask_start[i]`.
        skipped: why, by key.
    """

    place: dict[Any, int]
    shard: list[str]
    rows: np.ndarray
    position: np.ndarray
    masks: np.ndarray
    mask_start: np.ndarray
    skipped: dict[Any, str]


class FeatureStore:
    """A feature store, opened for reading; shards are memory-mapped and may be read from several processes.

    Args:
        path: the store's folder.

    Raises:
        StoreError: there is no store, its manifest cannot be read, or it names a shard outside the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header = read_header(self.path)
        table = read_manifest(self.path, READ_COLUMNS)
        self.shard_files = _shard_files(table)
        self._places = {name: own_path(self.path, SHARDS, name) for name in self.shard_files}
        self._parts = {part: _index(table, part) for part in PARTS if part in self.header["parts"]}
        self._handles: dict[str, Any] = {}
        self._verified: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: every process maps the shards itself."""
        return {**self.__dict__, "_handles": {}}

    @property
    def parts(self) -> list[Part]:
        """Parts that the store holds."""
        return list(self._parts)

    @property
    def sealed(self) -> bool:
        """Whether the extraction that wrote it came to its end."""
        return (self.path / MANIFEST).is_file()

    def command(self, part: Part) -> str:
        """Return the command that makes a part and mends it."""
        return str(self.header["parts"][part]["command"])

    def __len__(self) -> int:
        """Number of videos."""
        return max((len(self._parts[p].place) for p in ("frames", "patches", "audio") if p in self._parts), default=0)

    def skipped(self, part: Part) -> dict[Any, str]:
        """Return the items that extraction skipped, each with its reason."""
        return self._part(part).skipped

    def require(self, part: Part, expected: Fingerprint) -> None:
        """Check that a part was made with the encoder, weights, sampling and preprocessing of this run.

        Args:
            part: which part.
            expected: values by field of `FINGERPRINT_FIELDS`; fields that the caller does not know are left out.

        Raises:
            StoreError: the part is absent, or a field differs; both values are shown.
        """
        self._part(part)
        differing = differences(self.header["parts"][part]["fingerprint"], expected)
        if differing:
            raise StoreError(
                f"the feature store {self.path} does not fit this run; its part {part!r} was made otherwise. "
                f"{differing}. Set the run's options to the store's, or write another store with tvr extract --out"
            )

    def require_items(self, part: Part, keys: Sequence[Any]) -> None:
        """Check that a part holds all of these items, or says why it skipped them.

        Raises:
            StoreError: items are missing: the extraction is not finished, or was of something else.
        """
        rows = self._part(part)
        absent = [key for key in keys if key not in rows.place and key not in rows.skipped]
        if absent:
            state = "is complete, but of other data" if self.sealed else "is not complete"
            raise StoreError(
                f"the feature store {self.path} {state}: {len(absent)} of {len(keys)} items of part {part!r} are "
                f"missing, first {_name(absent[0])}. Finish it with: {self.command(part)}"
            )

    def verify(self) -> None:
        """Check every shard against its checksum; shards checked once are not read again.

        Raises:
            StoreError: a shard is missing, cut short or changed.
        """
        for name in self.shard_files:
            self._verify(name)

    def text(self, texts: Sequence[str]) -> TextFeatures:
        """Return the features of N texts: sentence (N, D), words (N, W, D), word_mask (N, W), float32.

        Raises:
            StoreError: a text is not in the store, or its shard is damaged.
        """
        rows = self._part("text")
        places = [self._place(rows, text_id(text), text) for text in texts]
        sentence = torch.stack([self._slice(rows, p, "sentence") for p in places])
        words = torch.stack([self._slice(rows, p, "words") for p in places])
        return TextFeatures(sentence.float(), words.float(), _masks(rows, places))

    def video(self, keys: Sequence[VideoKey], patches: bool = False) -> VideoFeatures:
        """Return the features of M videos: frames (M, F, D), frame_mask (M, F), audio where the store has it, float32.

        Args:
            keys: (dataset, video id, span) of each video.
            patches: whether patch vectors (M, F, P, D) are wanted too.

        Raises:
            StoreError: a video or a part is not in the store, or a shard is damaged.
        """
        frames, mask = self._stacked("frames", keys)
        features = VideoFeatures(frames, mask)
        if patches:
            features.patches, _ = self._stacked("patches", keys)
        if "audio" in self._parts:
            features.audio, features.audio_mask = self._stacked("audio", keys)
        return features

    def first_video(self, patches: bool = False) -> VideoFeatures:
        """Return the features of the first video, as `video` does: what shapes to expect.

        Raises:
            StoreError: the store holds no videos.
        """
        keys = list(self._part("frames").place)
        if not keys:
            raise StoreError(f"the feature store {self.path} holds no videos; it was made by: {self.command('frames')}")
        return self.video(keys[:1], patches)

    def shards(self, part: Part) -> Iterator[Shard]:
        """Iterate over a part shard by shard, in the order of extraction; features are float32."""
        rows = self._part(part)
        members: dict[str, list[tuple[str, int]]] = {}
        for key, place in rows.place.items():
            members.setdefault(rows.shard[place], []).append((key if isinstance(key, str) else key[1], place))
        for items in members.values():
            names = ("sentence", "words") if part == "text" else (part,)
            places = [place for _, place in items]
            tensors = {n: torch.stack([self._slice(rows, p, n) for p in places]).float() for n in names}
            yield Shard([item for item, _ in items], tensors, _masks(rows, places))

    def _part(self, part: Part) -> _Rows:
        if part not in self._parts:
            raise StoreError(
                f"the feature store {self.path} has no {part}, only {', '.join(self._parts) or 'nothing yet'}; add it: "
                f"tvr extract --config ... --what {part} --out {self.path}"
            )
        return self._parts[part]

    def _stacked(self, part: Part, keys: Sequence[VideoKey]) -> tuple[Tensor, Tensor]:
        rows = self._part(part)
        places = [self._place(rows, key, _name(key)) for key in keys]
        return torch.stack([self._slice(rows, p, part) for p in places]).float(), _masks(rows, places)

    def _place(self, rows: _Rows, key: Any, name: str) -> int:
        place = rows.place.get(key)
        if place is None:
            reason = f"it was skipped: {rows.skipped[key]}" if key in rows.skipped else "it is not there"
            raise StoreError(f"the feature store {self.path} has no features of {name}: {reason}")
        return place

    def _slice(self, rows: _Rows, place: int, tensor: str) -> Tensor:
        shard = self._open(rows.shard[place]).get_slice(tensor)
        if tensor == "sentence":
            return shard[int(rows.position[place])]
        start, stop = rows.rows[place]
        return shard[int(start) : int(stop)]

    def _open(self, name: str) -> Any:
        if name not in self._handles:
            self._verify(name)
            try:
                self._handles[name] = safe_open(self._places[name], framework="pt")
            except (SafetensorError, OSError) as error:
                raise StoreError(f"{self._places[name]}: cannot be read: {error}; {self._mend(name)}") from error
        return self._handles[name]

    def _verify(self, name: str) -> None:
        if name in self._verified:
            return
        problem = shard_problem(self._places[name], *self.shard_files[name])
        if problem:
            raise StoreError(f"{problem}; {self._mend(name)}")
        self._verified.add(name)

    def _mend(self, name: str) -> str:
        part = next(part for part in PARTS if name.startswith(part))
        return f"this command writes it anew and keeps the rest: {self.command(part)}"


def _shard_files(table: pa.Table) -> dict[str, tuple[str, int]]:
    columns = (table.column(name).to_pylist() for name in ("shard", "shard_sha256", "shard_bytes"))
    return {name: (sha256, size) for name, sha256, size in zip(*columns, strict=True) if name is not None}


def _index(table: pa.Table, part: str) -> _Rows:
    table = table.filter(pc.equal(table.column("part"), part))
    read = table.filter(pc.is_null(table.column("skipped"))).combine_chunks()
    lengths = pc.list_value_length(read.column("mask")).to_numpy()
    rows = _Rows(
        place={key: place for place, key in enumerate(_keys(read, part))},
        shard=read.column("shard").to_pylist(),
        rows=np.stack([read.column("row_start").to_numpy(), read.column("row_stop").to_numpy()], axis=1),
        position=read.column("position").to_numpy(),
        masks=pc.list_flatten(read.column("mask")).to_numpy().astype(bool),
        mask_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        skipped={},
    )
    left = table.filter(pc.is_valid(table.column("skipped")))
    reasons = zip(_keys(left, part), left.column("skipped").to_pylist(), strict=True)
    # An item may have been skipped by one run and read by a later one.
    rows.skipped = {key: reason for key, reason in reasons if key not in rows.place}
    return rows


def _keys(table: pa.Table, part: str) -> list[Any]:
    names = table.column("id").to_pylist()
    if part == "text":
        return names
    starts, ends = table.column("span_start").to_pylist(), table.column("span_end").to_pylist()
    spans = [None if start is None else (start, end) for start, end in zip(starts, ends, strict=True)]
    return list(zip(table.column("dataset").to_pylist(), names, spans, strict=True))


def _masks(rows: _Rows, places: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.stack([rows.masks[rows.mask_start[p] : rows.mask_start[p + 1]] for p in places]))


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    _, name, span = key
    return name if span is None else f"{name} ({span[0]:g} to {span[1]:g} s)"
