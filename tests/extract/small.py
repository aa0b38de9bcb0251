"""Encoders and settings of small extractions."""

import torch

from tvr_lightning.encoders import TinyClipEncoder, TinyWhisperEncoder
from tvr_lightning.extract.plan import ExtractOptions

DATA = {"frames": 3, "words": 12, "image_size": 32, "batch_size": 4, "eval_batch_size": 3, "num_workers": 0}


def encoders(
    seed: int = 0, kind: type[TinyClipEncoder] = TinyClipEncoder
) -> tuple[TinyClipEncoder, TinyWhisperEncoder]:
    torch.manual_seed(seed)
    clip = kind(width=64, image_size=32, text_layers=1, vision_layers=1).requires_grad_(False)
    return clip, TinyWhisperEncoder(width=16, layers=1)


def options(out: object, **changes: object) -> ExtractOptions:
    settings = {"batch_size": 2, "shard_size": 4, "num_workers": 0, "progress": False, "command": "tvr extract again"}
    return ExtractOptions(str(out), **{**settings, **changes})
