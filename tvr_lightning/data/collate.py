"""Joins the items that a dataset reads into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tvr_lightning.features import Record

R = TypeVar("R", bound=Record)


def collate(items: Sequence[R]) -> R:
    """Concatenate records of one or no items each: TextBatch, VideoBatch or PairBatch.

    Videos are padded to the same number of frames when they are read, so batches need no padding of their own. A
    record of no items (a video that evaluation skipped) leaves only its entry in `skipped`.
    """
    return type(items[0]).cat(items)
