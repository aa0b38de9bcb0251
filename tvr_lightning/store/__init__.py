"""Feature stores on disk, independent of datasets and encoders."""

from tvr_lightning.store.feature_store import (
    PARTS,
    FeatureStore,
    Fingerprint,
    StoreError,
    StoreItem,
    StoreWriter,
    VideoKey,
)

__all__ = ["PARTS", "FeatureStore", "Fingerprint", "StoreError", "StoreItem", "StoreWriter", "VideoKey"]
