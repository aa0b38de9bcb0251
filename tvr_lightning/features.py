"""What the rooms of the package exchange: features of texts, of videos, and of matching pairs.

All are plain dataclasses over `Record`, which gives them `.to`, `.pin_memory`, indexing and `cat`. They are not frozen:
Lightning's precision plugins rebuild dataclasses field by field, and `pin_memory` skips what has no such method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", bound="Record")
WHOLE = {"whole": True}


@dataclass
class Record:
    """A dataclass whose fields share their first dimension: tensors, lists, dicts, other records, or None.

    A field declared with `metadata=WHOLE` belongs to the record as a whole: indexing keeps it, `cat` joins it.
    The tensors of N items are (N, ...), such as (N, D).
    """

    def _fields(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]

    def _item_fields(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if not f.metadata.get("whole")]

    def tensors(self) -> list[Tensor]:
        """Return all tensors (any shape), nested ones included, in the order of the fields."""
        found: list[Tensor] = []
        self.apply(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def apply(self: R, function: Callable[[Tensor], Tensor]) -> R:
        """Return a copy with `function` applied to every tensor (any shape), nested ones included."""
        return dataclasses.replace(self, **{name: _apply(value, function) for name, value in self._fields()})

    def to(self: R, *args: Any, **kwargs: Any) -> R:
        """Return a copy with every tensor moved as by `Tensor.to`; a dtype changes floating-point tensors only."""

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return tensor.to(*args, **kwargs)
            only = [a for a in args if not isinstance(a, torch.dtype)]
            rest = {k: v for k, v in kwargs.items() if k != "dtype"}
            return tensor.to(*only, **rest) if only or rest else tensor

        return self.apply(move)

    def pin_memory(self: R) -> R:
        """Return a copy in page-locked memory (called by the DataLoader's pinning thread)."""
        return self.apply(Tensor.pin_memory)

    def detach(self: R) -> R:
        """Return a copy cut from the graph."""
        return self.apply(Tensor.detach)

    def float(self: R) -> R:
        """Return a copy whose half-precision tensors are float32; float64 stays."""
        return self.apply(lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t)

    def __len__(self) -> int:
        """Number of items: the first dimension that all fields share."""
        for _, value in self._item_fields():
            if value is not None and not (isinstance(value, dict) and not value):
                return len(next(iter(value.values()))) if isinstance(value, dict) else len(value)
        return 0

    def __getitem__(self: R, index: Any) -> R:
        """Return the items at `index`: a slice, a list of integers, or a (K,) index or mask tensor."""
        return dataclasses.replace(self, **{name: _select(value, index) for name, value in self._item_fields()})

    @classmethod
    def cat(cls: type[R], records: Sequence[R]) -> R:
        """Concatenate along the first dimension.

        Raises:
            ValueError: nothing to concatenate, or a field is None in some records only.
        """
        if not records:
            raise ValueError(f"{cls.__name__}.cat needs at least one record")
        joined = {}
        for f in dataclasses.fields(records[0]):
            joined[f.name] = _cat(f"{cls.__name__}.{f.name}", [getattr(record, f.name) for record in records])
        return dataclasses.replace(records[0], **joined)


def _apply(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Record):
        return value.apply(function)
    if isinstance(value, dict):
        return {key: _apply(item, function) for key, item in value.items()}
    return value


def _select(value: Any, index: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: _select(item, index) for key, item in value.items()}
    if isinstance(value, list):
        if isinstance(index, slice):
            return value[index]
        if isinstance(index, Tensor):
            index = index.nonzero().flatten().tolist() if index.dtype == torch.bool else index.tolist()
        return [value[i] for i in index]
    return value[index]


def _cat(name: str, values: list[Any]) -> Any:
    missing = sum(value is None for value in values)
    if missing == len(values):
        return None
    if missing:
        raise ValueError(f"{name} is missing in {missing} of {len(values)} records; all or none must have it")
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, Record):
        return type(first).cat(values)
    if isinstance(first, dict):
        return {key: _cat(f"{name}[{key!r}]", [value[key] for value in values]) for key in first}
    return [item for value in values for item in value]


@dataclass
class Placed(Record, Generic[R]):
    """Features of N items, and where these stand in their split.

    Attributes:
        index: (N,) int64, places; the same one several times where loaders were padded over devices.
        features: of the N items.
    """

    index: Tensor
    features: R

    def distinct(self) -> Placed[R]:
        """Return every item once, by rising place."""
        return self[first_of_each(self.index)[1]]


def first_of_each(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values of `index` (N,), ascending, and the position (K,) where each occurs first."""
    values, inverse = index.unique(return_inverse=True)
    first = torch.full_like(values, len(index)).scatter_reduce(
        0, inverse, torch.arange(len(index), device=index.device), "amin"
    )
    return values, first


@dataclass
class TextFeatures(Record):
    """Features of N texts.

    Attributes:
        sentence: (N, D) sentence vectors (CLIP: the EOT position), not normalised.
        words: (N, W, D) vectors of all token positions, padding included, not normalised.
        word_mask: (N, W) bool, True where there is a token (SOT and EOT included).
    """

    sentence: Tensor
    words: Tensor
    word_mask: Tensor

    def without_words(self) -> TextFeatures:
        """Return the sentences with words (N, 0, D): what methods need that read the sentence alone."""
        return TextFeatures(self.sentence, self.words[:, :0], self.word_mask[:, :0])


@dataclass
class VideoFeatures(Record):
    """Features of M videos.

    Attributes:
        frames: (M, F, D) frame vectors (CLIP: the CLS token), not normalised.
        frame_mask: (M, F) bool, True where there is a frame.
        patches: (M, F, P, D) patch vectors, where a method asks for them.
        audio: (M, F, D_a) audio vectors aligned with the frames, where a method asks for them.
        audio_mask: (M, F) bool, True where there is sound.
        clip_frames: (M, F, D) frame vectors before a method's temporal encoder, kept by methods that score with both.
    """

    frames: Tensor
    frame_mask: Tensor
    patches: Tensor | None = None
    audio: Tensor | None = None
    audio_mask: Tensor | None = None
    clip_frames: Tensor | None = None


@dataclass
class PairedFeatures(Record):
    """Features of B matching pairs: row i of `text` and row i of `video` belong together.

    Attributes:
        text: features of B texts, sentences (B, D) and words (B, W, D).
        video: features of B videos, frames (B, F, D).
        text_index, video_index: (B,) int64, position of each item in its dataset split; a video that appears twice
            in a batch has the same `video_index` twice.
        extras: what a method's loss may use besides (DPDV's recover captions), keyed by name, first dimension B.
    """

    text: TextFeatures
    video: VideoFeatures
    text_index: Tensor
    video_index: Tensor
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass
class Scores:
    """Scores of N texts against M videos.

    Attributes:
        similarity: (N, M), `similarity[i, j]` is text i against video j, before the temperature unless a method's
            docstring says otherwise; larger is better.
        parts: named tensors (N, M, ...) that the similarity was made of, for losses and reports.
    """

    similarity: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
