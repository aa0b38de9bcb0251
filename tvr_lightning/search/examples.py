"""Examples between requests: kept in memory under an id, and as bytes where another server compares with them."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tvr_lightning.features import VideoFeatures
from tvr_lightning.search.errors import SearchError
from tvr_lightning.search.ranking import STRETCHES_OF_AN_EXAMPLE, Example

EXAMPLES_KEPT = 256
"""Examples whose features stay in memory, so that a page can ask by them again."""


class Examples:
    """Examples by id; the oldest make room for new ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Example] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, example: Example, name: str | None = None) -> str:
        """Keep an example and return its id, which nobody guesses.

        Args:
            example: what is kept.
            name: its id where it has one; the same example then takes no second place.
        """
        with self._lock:
            name = name or secrets.token_hex(8)
            self._kept[name] = example
            self._kept.move_to_end(name)
            while len(self._kept) > EXAMPLES_KEPT:
                self._kept.popitem(last=False)
        return name

    def get(self, name: str) -> Example | None:
        """Return an example, None where it is none, or no more."""
        with self._lock:
            return self._kept.get(name)


def content_id(packed: bytes) -> str:
    """Return the id of an example that came as bytes."""
    return hashlib.sha256(packed).hexdigest()[:16]


def pack(example: Example) -> bytes:
    """Return what `unpack` makes the same comparisons of: at most `STRETCHES_OF_AN_EXAMPLE` stretches."""
    stretches = example.stretches()
    longest = max(len(stretch) for stretch in stretches)
    frames = torch.zeros(len(stretches), longest, stretches[0].shape[1])
    mask = torch.zeros(len(stretches), longest, dtype=torch.bool)
    for place, stretch in enumerate(stretches):
        frames[place, : len(stretch)], mask[place, : len(stretch)] = stretch, True
    return save({"frames": frames, "frame_mask": mask})


def unpack(content: bytes, name: str) -> Example:
    """Return the example that `pack` wrote.

    Raises:
        SearchError: it is none.
    """
    wrong = SearchError("The features of the example are not in the format of tvr serve. Send a clip or an image.")
    try:
        tensors = load(content)
        frames, mask = tensors["frames"], tensors["frame_mask"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise wrong from error
    whole = frames.ndim == 3 and mask.ndim == 2 and frames.shape[:2] == mask.shape and bool(frames.numel())
    if not whole or len(frames) > STRETCHES_OF_AN_EXAMPLE or mask.dtype != torch.bool or frames.dtype != torch.float32:
        raise wrong
    if not frames.isfinite().all() or not mask.any(1).all():
        raise wrong
    return Example(name, VideoFeatures(frames, mask))
