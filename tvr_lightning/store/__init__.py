"""Feature stores on disk, independent of datasets and encoders."""

from tvr_lightning.store.feature_store import FeatureStore, StoreWriter
from tvr_lightning.store.shard import PARTS, Fingerprint, Part, StoreError, StoreItem, VideoKey

__all__ = ["PARTS", "FeatureStore", "Fingerprint", "Part", "StoreError", "StoreItem", "StoreWriter", "VideoKey"]
