"""Encoders and settings of small extractions."""

import torch

from tvr_lightning.encoders import TinyClipEncoder, TinyWhisperEncoder
from tvr_lightning.extract.plan import ExtractOptions


def encoders(seed=0, kind=TinyClipEncoder):
    torch.manual_seed(seed)
    clip = kind(width=64, image_size=32, text_layers=1, vision_layers=1).requires_grad_(False)
    return clip, TinyWhisperEncoder(width=16, layers=1)


def options(out, **changes):
    settings = {"batch_size": 2, "shard_size": 4, "num_workers": 0, "progress": False, "command": "tvr extract again"}
    return ExtractOptions(str(out), **{**settings, **changes})
