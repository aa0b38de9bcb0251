"""Reader for the feature stores of `tvr extract`: memory-mapped, verified, safe during writes by another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tvr_lightning.features import TextFeatures, VideoFeatures
from tvr_lightning.store.shard import (
    PARTS,
    FileMark,
    Fingerprint,
    Part,
    Record,
    StoreError,
    StoreItem,
    VideoKey,
    check_alike,
    differences,
    is_same_file,
    part_of,
    read_record,
    shard_files,
    shard_problem,
    text_id,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class _Items:
    """Items of one part and their positions in the shards.

    Attributes:
        made: Fingerprint of the part.
        command: Command that creates and repairs the part.
        place: File and row of each item, by key.
        marks: File mark of each item and each skipped item, by key.
        skipped: Reason for each skipped item, by key.
    """

    made: Fingerprint
    command: str
    place: dict[Any, tuple[Path, int]] = field(default_factory=dict)
    marks: dict[Any, FileMark | None] = field(default_factory=dict)
    skipped: dict[Any, str] = field(default_factory=dict)


class FeatureStore:
    """A feature store opened for reading. Shards are memory-mapped and can be read from several processes.

    If the header of a shard cannot be read, its items count as missing; the other shards can still be read.

    Args:
        path: Folder of the store.
        parts: Parts to open. The shards of other parts are ignored.

    Raises:
        StoreError: There is no store, it has another format, or it mixes the shards of two stores.
    """

    def __init__(self, path: str | Path, parts: Sequence[Part] = PARTS) -> None:
        self.path = Path(path)
        self._records: dict[Path, Record] = {}
        self._damaged: list[str] = []
        files = shard_files(self.path)
        if not files:
            raise StoreError(
                f"{self.path} is not a feature store, since it contains no shards. Create one with: tvr extract "
                f"--config ... --out {self.path}"
            )
        for file in files:
            if part_of(file) not in parts:
                continue
            try:
                self._records[file] = read_record(file)
            except StoreError as error:
                self._damaged.append(str(error))
        check_alike(self.path, list(self._records.values()))
        self._parts = {part: items for part in PARTS if (items := _items_of(part, self._records)) is not None}
        self._handles: dict[Path, Any] = {}
        self._verified: set[Path] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Drop the open files, since each process maps the shards itself."""
        return {**self.__dict__, "_handles": {}}

    @property
    def parts(self) -> list[Part]:
        """Parts that the store contains."""
        return list(self._parts)

    def command(self, part: Part) -> str:
        """Return the command that creates and repairs a part."""
        return self._part(part).command

    def __len__(self) -> int:
        """Return the number of videos."""
        return max((len(self._parts[p].place) for p in ("frames", "patches", "audio") if p in self._parts), default=0)

    def skipped(self, part: Part) -> dict[Any, str]:
        """Return the items that extraction skipped, with the reason for each."""
        return self._part(part).skipped

    def table(self) -> pd.DataFrame:
        """Return one row per item and part: its origin, its shard, its fingerprint, and the reason if it was skipped.

        Columns: part, dataset, split, id, path, span_start, span_end (seconds), text, shard, row, dtype, encoder,
        weights, sampling, preprocessing, skipped.
        """
        import pandas as pd  # takes half a second, which training and search do not need

        rows = []
        for file, record in self._records.items():
            of_shard = {"part": record.part, "shard": file.name, "dtype": record.dtype, **record.fingerprint}
            rows += [{**_described(item), **of_shard, "row": row} for row, item in enumerate(record.items)]
            rows += [{**_described(item), **of_shard, "skipped": reason} for item, reason in record.skipped]
        columns = ["part", "dataset", "split", "id", "path", "span_start", "span_end", "text", "shard", "row", "dtype"]
        return pd.DataFrame(rows, columns=[*columns, "encoder", "weights", "sampling", "preprocessing", "skipped"])

    def require(self, part: Part, expected: Fingerprint) -> None:
        """Check that a part was created with the encoder, weights, sampling, and preprocessing of this run.

        Args:
            part: Part to check.
            expected: Values by field of `FINGERPRINT_FIELDS`, without the fields that the caller does not know.

        Raises:
            StoreError: The part is missing, or a field differs. The message contains both values.
        """
        differing = differences(self._part(part).made, expected)
        if differing:
            raise StoreError(
                f"The feature store {self.path} does not fit this run, since its part {part!r} has other settings: "
                f"{differing}. Set the run's options to the store's, or write another store with tvr extract --out"
            )

    def require_items(self, part: Part, keys: Sequence[Any]) -> None:
        """Check that a part contains all of these items, or the reason why they were skipped.

        Raises:
            StoreError: Items are missing because the extraction is incomplete, used another source, or shards are
                damaged.
        """
        items = self._part(part)
        absent = [key for key in keys if key not in items.place and key not in items.skipped]
        if absent:
            raise StoreError(
                f"{len(absent)} of {len(keys)} items of part {part!r} are missing in the feature store {self.path}, "
                f"first {_name(absent[0])}{self._why()}. Complete it with: {items.command}"
            )

    def require_files(self, part: Part, paths: Mapping[Any, Path]) -> None:
        """Check that a part was created from these files, and that no skipped file has changed.

        Files that do not exist on this machine are not compared.

        Args:
            part: Part to check.
            paths: File of each video, by key.

        Raises:
            StoreError: Files have changed or are not the ones whose features the store contains.
        """
        items = self._part(part)
        changed = [
            path
            for key, path in paths.items()
            if (items.marks.get(key) is not None or key in items.skipped)
            and path.is_file()
            and not is_same_file(path, items.marks[key])
        ]
        if changed:
            raise StoreError(
                f"{len(changed)} of {len(paths)} videos are not the files whose {part} the feature store {self.path} "
                f"contains, first {changed[0]}. Extract them again with: {items.command}"
            )

    def verify(self) -> None:
        """Check every shard against the digest in its name. Each shard is read only once.

        Raises:
            StoreError: A shard is truncated or has changed.
        """
        if self._damaged:
            raise StoreError(f"{self._damaged[0]}. {self._mend()}")
        for file in self._records:
            self._verify(file)

    def text(self, texts: Sequence[str]) -> TextFeatures:
        """Return the features of N texts: sentence (N, D), words (N, W, D), word_mask (N, W), float32.

        Raises:
            StoreError: A text is not in the store, or its shard is damaged.
        """
        places = [self._place("text", text_id(text), text) for text in texts]
        sentence, words, mask = (self._rows(places, name) for name in ("sentence", "words", "mask"))
        return TextFeatures(sentence.float(), words.float(), mask)

    def video(self, keys: Sequence[VideoKey], patches: bool = False) -> VideoFeatures:
        """Return the features of M videos: frames (M, F, D), frame_mask (M, F), and audio if stored, float32.

        Args:
            keys: (dataset, video id, span) of each video.
            patches: Whether to include the patch vectors (M, F, P, D).

        Raises:
            StoreError: A video or a part is not in the store, or a shard is damaged.
        """
        features = VideoFeatures(*self._stacked("frames", keys))
        if patches:
            features.patches, _ = self._stacked("patches", keys)
        if "audio" in self._parts:
            features.audio, features.audio_mask = self._stacked("audio", keys)
        return features

    def first_video(self, patches: bool = False) -> VideoFeatures:
        """Return the features of the first video, which show the shapes to expect from `video`.

        Raises:
            StoreError: The store contains no videos.
        """
        keys = list(self._part("frames").place)
        if not keys:
            raise StoreError(
                f"The feature store {self.path} contains no videos. It was created with: {self.command('frames')}"
            )
        return self.video(keys[:1], patches)

    def _part(self, part: Part) -> _Items:
        if part not in self._parts:
            raise StoreError(
                f"The feature store {self.path} has no part {part!r}, only {', '.join(self._parts) or 'nothing yet'}"
                f"{self._why()}. Add it with: tvr extract --config ... --parts {part} --out {self.path}"
            )
        return self._parts[part]

    def _stacked(self, part: Part, keys: Sequence[VideoKey]) -> tuple[Tensor, Tensor]:
        places = [self._place(part, key, _name(key)) for key in keys]
        return self._rows(places, part).float(), self._rows(places, "mask")

    def _place(self, part: Part, key: Any, name: str) -> tuple[Path, int]:
        items = self._part(part)
        place = items.place.get(key)
        if place is None:
            reason = f"it was skipped: {items.skipped[key]}" if key in items.skipped else "it is missing"
            raise StoreError(f"the feature store {self.path} has no features of {name}: {reason}{self._why()}")
        return place

    def _rows(self, places: Sequence[tuple[Path, int]], tensor: str) -> Tensor:
        return torch.stack([self._open(file).get_slice(tensor)[row] for file, row in places])

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            self._verify(file)
            try:
                self._handles[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise StoreError(f"{file}: cannot be read: {error}. {self._mend(file)}") from error
        return self._handles[file]

    def _verify(self, file: Path) -> None:
        if file in self._verified:
            return
        problem = shard_problem(file)
        if problem:
            raise StoreError(f"{problem}. {self._mend(file)}")
        self._verified.add(file)

    def _mend(self, file: Path | None = None) -> str:
        known = self._records.get(file) if file else next(iter(self._records.values()), None)
        command = known.command if known else f"tvr extract --config ... --out {self.path}"
        return f"Rewrite it, and keep the rest, with: {command}"

    def _why(self) -> str:
        if not self._damaged:
            return ""
        more = f" and {len(self._damaged) - 1} more" if len(self._damaged) > 1 else ""
        return f" (damaged: {self._damaged[0]}{more})"


def _items_of(part: Part, records: dict[Path, Record]) -> _Items | None:
    items: _Items | None = None
    for file, record in records.items():
        if record.part != part:
            continue
        items = items or _Items(record.fingerprint, record.command)
        # The last shard counts: in an earlier run, the file may have been skipped or may have been a different one.
        for row, item in enumerate(record.items):
            items.place[item.key], items.marks[item.key] = (file, row), item.file
            items.skipped.pop(item.key, None)
        for item, reason in record.skipped:
            items.skipped[item.key], items.marks[item.key] = reason, item.file
            items.place.pop(item.key, None)
    return items


def _described(item: StoreItem) -> dict[str, Any]:
    start, end = item.span or (None, None)
    named = {name: getattr(item, name) for name in ("dataset", "split", "id", "path", "text")}
    return {**named, "span_start": start, "span_end": end}


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key
    _, name, span = key
    return name if span is None else f"{name} ({span[0]:g} to {span[1]:g} s)"
