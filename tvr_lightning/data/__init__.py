"""Datasets, decoding, and what a DataLoader hands to a method."""

from tvr_lightning.data.activitynet import ActivityNet
from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.charades import Charades
from tvr_lightning.data.didemo import DiDeMo
from tvr_lightning.data.folder import Folder
from tvr_lightning.data.lsmdc import LSMDC
from tvr_lightning.data.msrvtt import MSRVTT
from tvr_lightning.data.msrvtt_qa import MSRVTTQA
from tvr_lightning.data.msvd import MSVD
from tvr_lightning.data.vatex import VATEX

__all__ = [
    "LSMDC", "MSRVTT", "MSRVTTQA", "MSVD", "VATEX", "ActivityNet", "Charades", "DiDeMo", "Folder",
    "TextVideoDataModule",
]  # fmt: skip
