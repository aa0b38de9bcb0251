"""Text-video retrieval papers, reproduced with PyTorch Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tvr_lightning._torchvision import declare_missing_operators
from tvr_lightning._version import __version__

if TYPE_CHECKING:
    from tvr_lightning.model import Model

declare_missing_operators()

__all__ = ["__version__", "load"]


def load(source: str | Path, device: str = "cpu", trust: Sequence[str] = ()) -> Model:
    """Load a trained method: `tvr_lightning.model.load`."""
    from tvr_lightning.model import load as load_model  # only now, so that the package imports quickly

    return load_model(source, device, trust)
