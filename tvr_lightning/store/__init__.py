"""Feature stores on disk: shards, reader, and writer. Independent of datasets and encoders."""

from tvr_lightning.option_types import StoreDtype
from tvr_lightning.store.reader import FeatureStore
from tvr_lightning.store.shard import (
    PARTS,
    Fingerprint,
    Part,
    StoreError,
    StoreItem,
    VideoKey,
    differences,
    file_mark,
    is_same_file,
    text_id,
)
from tvr_lightning.store.writer import StoreWriter

__all__ = [
    "PARTS",
    "FeatureStore",
    "Fingerprint",
    "Part",
    "StoreDtype",
    "StoreError",
    "StoreItem",
    "StoreWriter",
    "VideoKey",
    "differences",
    "file_mark",
    "is_same_file",
    "text_id",
]
