"""Data that the modules of the package exchange: features of texts, of videos, and of matching pairs.

All are plain dataclasses based on `FeatureBatch`, which provides `.to`, `.pin_memory`, indexing and `cat`. They are not
frozen: Lightning's precision plugins rebuild dataclasses field by field, and `pin_memory` skips objects without such a
method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tvr_lightning.errors import UserError

R = TypeVar("R", bound="FeatureBatch")
WHOLE = {"whole": True}


@dataclass
class FeatureBatch:
    """Base of dataclasses whose fields share their first dimension: tensors, lists, dicts, other records, or None.

    A field declared with `metadata=WHOLE` belongs to the record as a whole: indexing keeps it, `cat` joins it. The
    tensors of N items are (N, ...), such as (N, D).
    """

    def __repr__(self) -> str:
        """Return the class and the shapes of its tensors."""
        shapes = [f"{name} {tuple(x.shape)}" for name, x in self._fields() if isinstance(x, Tensor)]
        return f"{type(self).__name__}({', '.join(shapes)})"

    def _fields(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]

    def _item_fields(self) -> list[tuple[str, Any]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if not f.metadata.get("whole")]

    def tensors(self) -> list[Tensor]:
        """Return all tensors (any shape), including nested ones, in the order of the fields."""
        found: list[Tensor] = []
        self.apply(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def apply(self: R, function: Callable[[Any], Any], kinds: tuple[type, ...] = (Tensor,)) -> R:
        """Return a copy with `function` applied to every tensor, or every value of `kinds`, including nested ones."""
        return dataclasses.replace(self, **{name: _apply(value, function, kinds) for name, value in self._fields()})

    def to(self: R, *args: Any, **kwargs: Any) -> R:
        """Return a copy with every tensor moved as by `Tensor.to`; a dtype changes only floating-point tensors."""
        others = [arg for arg in args if not isinstance(arg, torch.dtype)]
        named = {name: arg for name, arg in kwargs.items() if name != "dtype"}

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return tensor.to(*args, **kwargs)
            return tensor.to(*others, **named) if others or named else tensor

        return self.apply(move)

    def pin_memory(self: R) -> R:
        """Return a copy in page-locked memory (called by the DataLoader's pinning thread)."""
        return self.apply(Tensor.pin_memory)

    def detach(self: R) -> R:
        """Return a copy detached from the graph."""
        return self.apply(Tensor.detach)

    def float(self: R) -> R:
        """Return a copy whose half-precision tensors are float32; float64 stays."""
        return self.apply(lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t)

    def __len__(self) -> int:
        """Return the number of items: the first dimension of all fields."""
        for _, value in self._item_fields():
            first = next(iter(value.values()), None) if isinstance(value, dict) else value
            if first is not None:
                return len(first)
        return 0

    def __getitem__(self: R, index: Any) -> R:
        """Return the items at `index`: a slice, a list of integers, or an index or mask tensor (K,)."""
        return dataclasses.replace(self, **{name: _select(value, index) for name, value in self._item_fields()})

    @classmethod
    def cat(cls: type[R], records: Sequence[R]) -> R:
        """Concatenate along the first dimension.

        Raises:
            UserError: There are no records, or a field is None in only some of them.
        """
        if not records:
            raise UserError(f"{cls.__name__}.cat needs at least one record")
        columns = {name: [getattr(record, name) for record in records] for name, _ in records[0]._fields()}
        joined = {name: _cat(f"{cls.__name__}.{name}", values) for name, values in columns.items()}
        return dataclasses.replace(records[0], **joined)


def _apply(value: Any, function: Callable[[Any], Any], kinds: tuple[type, ...]) -> Any:
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, FeatureBatch):
        return value.apply(function, kinds)
    if isinstance(value, dict):
        return {key: _apply(item, function, kinds) for key, item in value.items()}
    return value


def _select(value: Any, index: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: _select(item, index) for key, item in value.items()}
    if isinstance(value, list) and not isinstance(index, slice):
        if isinstance(index, Tensor):
            index = index.nonzero().flatten().tolist() if index.dtype == torch.bool else index.tolist()
        return [value[i] for i in index]
    return value[index]


def _cat(name: str, values: list[Any]) -> Any:
    missing = sum(value is None for value in values)
    if missing == len(values):
        return None
    if missing:
        raise UserError(f"{name} is missing in {missing} of {len(values)} records; all or none must have it")
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, FeatureBatch):
        return type(first).cat(values)
    if isinstance(first, dict):
        return {key: _cat(f"{name}[{key!r}]", [value[key] for value in values]) for key in first}
    return [item for value in values for item in value]


@dataclass
class IndexedFeatures(FeatureBatch, Generic[R]):
    """Features of N items with their positions in the split.

    Attributes:
        index: Positions (N,) int64, with repetitions if loaders were padded to equal lengths across devices.
        features: Features of the N items.
    """

    index: Tensor
    features: R

    def distinct(self) -> IndexedFeatures[R]:
        """Return every item once, in ascending order of positions."""
        return self[first_of_each(self.index)[1]]


def first_of_each(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values of `index` (N,) in ascending order, and the first position (K,) of each."""
    values, inverse = index.unique(return_inverse=True)
    first = torch.full_like(values, len(index)).scatter_reduce(
        0, inverse, torch.arange(len(index), device=index.device), "amin"
    )
    return values, first


@dataclass(repr=False)
class TextFeatures(FeatureBatch):
    """Features of N texts.

    Attributes:
        sentence: Sentence vectors (N, D) (CLIP: the EOT position), not normalized.
        words: Vectors (N, W, D) of all token positions, including padding, not normalized.
        word_mask: Mask (N, W) bool, True for tokens (including SOT and EOT).
    """

    sentence: Tensor
    words: Tensor
    word_mask: Tensor

    def without_words(self) -> TextFeatures:
        """Return the sentences with words (N, 0, D), which is enough for methods that use only the sentence."""
        return TextFeatures(self.sentence, self.words[:, :0], self.word_mask[:, :0])


@dataclass(repr=False)
class VideoFeatures(FeatureBatch):
    """Features of M videos.

    Attributes:
        frames: Frame vectors (M, F, D) (CLIP: the CLS token), not normalized.
        frame_mask: Mask (M, F) bool, True for frames, False for padding.
        patches: Patch vectors (M, F, P, D), if a method needs them.
        audio: Audio vectors (M, F, D_a) aligned with the frames, if a method needs them.
        audio_mask: Mask (M, F) bool, True for frames with audio.
        clip_frames: Frame vectors (M, F, D) before a method's temporal encoder, for methods that score with both.
    """

    frames: Tensor
    frame_mask: Tensor
    patches: Tensor | None = None
    audio: Tensor | None = None
    audio_mask: Tensor | None = None
    clip_frames: Tensor | None = None


@dataclass
class PairedFeatures(FeatureBatch):
    """Features of B matching pairs: row i of `text` matches row i of `video`.

    Attributes:
        text: Features of B texts, sentences (B, D) and words (B, W, D).
        video: Features of B videos, frames (B, F, D).
        text_index: Positions (B,) int64 of the texts in their dataset split.
        video_index: Positions (B,) int64 of the videos in their dataset split; a video that appears twice in a batch
            has the same position twice.
        extras: Additional inputs of a method's loss (DPDV's recover captions) by name, first dimension B.
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
        similarity: Matrix (N, M) in which `similarity[i, j]` is the score of text i and video j, before the temperature
            unless a method's docstring states otherwise; larger is better.
        parts: Named tensors (N, M, ...) from which the similarity was computed, for losses and reports.
    """

    similarity: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
