"""Text-video retrieval papers, reproduced with PyTorch Lightning.

import tvr_lightning

model = tvr_lightning.load("runs/gare-msrvtt/version_0/checkpoints/last.ckpt")
videos = model.encode_video(["dog.mp4", "kitchen.mp4"])
model.score(["a dog runs", "someone cooks"], videos)  # (2, 2), on the scale of a cosine
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tvr_lightning._torchvision import TorchvisionFinder

if TYPE_CHECKING:
    from tvr_lightning.api.export import export, merge
    from tvr_lightning.api.hub import push_to_hub
    from tvr_lightning.api.model import load, zero_shot

if "torchvision" not in sys.modules:
    sys.meta_path.insert(0, TorchvisionFinder())

__all__ = ["__version__", "export", "load", "merge", "push_to_hub", "zero_shot"]
__version__ = "0.1.0"

# Imported on first access, so that the package itself and the help of the command line need no torch.
_LAZY = {
    "export": "tvr_lightning.api.export",
    "load": "tvr_lightning.api.model",
    "merge": "tvr_lightning.api.export",
    "push_to_hub": "tvr_lightning.api.hub",
    "zero_shot": "tvr_lightning.api.model",
}


def __getattr__(name: str) -> Any:
    """Return a lazily imported attribute of the package."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the package, including those that are not yet imported."""
    return sorted({*globals(), *_LAZY})
