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

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import functional as F

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
        shapes = [f"{name} {tuple(x.shape)}" for name, x in vars(self).items() if isinstance(x, Tensor)]
        return f"{type(self).__name__}({', '.join(shapes)})"

    def _item_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("whole")}

    def tensors(self) -> list[Tensor]:
        """Return all tensors (any shape), including nested ones, in the order of the fields."""
        found: list[Tensor] = []
        self.apply(found.append)
        return found

    def apply(self: R, function: Callable[[Any], Any], kinds: tuple[type, ...] = (Tensor,)) -> R:
        """Return a copy with `function` applied to every tensor, or every value of `kinds`, including nested ones."""
        changed: R = apply_to_collection(self, kinds, function)
        return changed

    def to(self: R, *args: Any, **kwargs: Any) -> R:
        """Return a copy with every tensor moved as by `Tensor.to`; a dtype changes only floating-point tensors."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self.apply(lambda t: t.to(device, dtype if t.is_floating_point() else None, non_blocking))

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
        fields = self._item_fields().values()
        firsts = [next(iter(field.values()), None) if isinstance(field, dict) else field for field in fields]
        return next((len(first) for first in firsts if first is not None), 0)

    def __getitem__(self: R, index: Any) -> R:
        """Return the items at `index`: a slice, a list of integers, or an index or mask tensor (K,)."""
        return dataclasses.replace(self, **_select(self._item_fields(), index))

    @classmethod
    def cat(cls: type[R], records: Sequence[R]) -> R:
        """Concatenate along the first dimension, padding the second; a field must be None in all records or in none."""
        if not records:
            raise UserError(f"{cls.__name__}.cat needs at least one record")
        return dataclasses.replace(records[0], **_cat(cls.__name__, [vars(record) for record in records]))


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
        longest = max((value.shape[1] for value in values if value.ndim > 1), default=0)
        return torch.cat([_lengthened(value, longest) for value in values])
    if isinstance(first, FeatureBatch):
        return type(first).cat(values)
    if isinstance(first, dict):
        return {key: _cat(f"{name}.{key}", [value[key] for value in values]) for key in first}
    return [item for value in values for item in value]


def _lengthened(value: Tensor, length: int) -> Tensor:
    """Return a tensor whose second dimension, such as the tokens of a video, is padded with zeros to `length`."""
    missing = length - value.shape[1] if value.ndim > 1 else 0
    return F.pad(value, [0, 0] * (value.ndim - 2) + [0, missing]) if missing else value


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
        return self[first_of_each(self.index)]


def first_of_each(index: Tensor) -> Tensor:
    """Return the first position (K,) of each distinct value of `index` (N,), in ascending order of the values."""
    return torch.from_numpy(np.unique(index.cpu(), return_index=True)[1])


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

    def padded(self, words: int) -> TextFeatures:
        """Return the features with W = `words` positions, of which the added ones are zero."""
        more = words - self.words.shape[1]
        return TextFeatures(self.sentence, F.pad(self.words, (0, 0, 0, more)), F.pad(self.word_mask, (0, more)))

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
