"""Datasets, decoding, and the batches that a DataLoader passes to a method."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvr_lightning.data.activitynet import ActivityNet
    from tvr_lightning.data.base import TextVideoDataModule
    from tvr_lightning.data.charades import Charades
    from tvr_lightning.data.didemo import DiDeMo
    from tvr_lightning.data.lsmdc import LSMDC
    from tvr_lightning.data.msrvtt import MSRVTT
    from tvr_lightning.data.msrvtt_qa import MSRVTTQA
    from tvr_lightning.data.msvd import MSVD
    from tvr_lightning.data.vatex import VATEX
    from tvr_lightning.data.video_folder import VideoFolder

__all__ = [
    "LSMDC", "MSRVTT", "MSRVTTQA", "MSVD", "VATEX", "ActivityNet", "Charades", "DiDeMo", "TextVideoDataModule",
    "VideoFolder",
]  # fmt: skip

# Imported on first access, because reading annotations and writing a dataset do not need Lightning.
_FILES = {"MSRVTTQA": "msrvtt_qa", "TextVideoDataModule": "base", "VideoFolder": "video_folder"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{_FILES.get(name, name.lower())}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def import_all() -> None:
    """Import every dataset, so that recipes can refer to each by its class name alone."""
    for name in __all__:
        __getattr__(name)
