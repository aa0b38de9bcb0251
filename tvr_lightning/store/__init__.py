"""Feature stores on disk: shards, reader, and writer. Independent of datasets and encoders."""

from tvr_lightning.store.reader import FeatureStore
from tvr_lightning.store.shard import PARTS, Fingerprint, Part, StoreError, StoreItem, VideoKey
from tvr_lightning.store.writer import StoreWriter

__all__ = ["PARTS", "FeatureStore", "Fingerprint", "Part", "StoreError", "StoreItem", "StoreWriter", "VideoKey"]
