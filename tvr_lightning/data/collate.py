"""Collation of dataset items into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tvr_lightning.features import Record

R = TypeVar("R", bound=Record)


def collate(items: Sequence[R]) -> R:
    """Concatenate records with at most one item each: TextBatch, VideoBatch or PairBatch.

    Videos are padded to the same number of frames when they are read, so batches are not padded here. An empty record
    (a video that evaluation skipped) adds only its entry in `skipped`.
    """
    return type(items[0]).cat(items)
