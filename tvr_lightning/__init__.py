"""Text-video retrieval papers, reproduced with PyTorch Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tvr_lightning._torchvision import mend_on_import
from tvr_lightning._version import __version__

if TYPE_CHECKING:
    from tvr_lightning.model import Model

mend_on_import()

__all__ = ["__version__", "load", "push_to_hub"]


def load(source: str | Path, device: str = "cpu", trust: Sequence[str] = ()) -> Model:
    """Load a trained method: `tvr_lightning.model.load`."""
    from tvr_lightning.model import load as load_model  # only now, so that the package imports quickly

    return load_model(source, device, trust)


def push_to_hub(
    checkpoint: str | Path,
    name: str,
    *,
    results: str | Path | None = None,
    private: bool = False,
    token: str | None = None,
) -> str:
    """Publish a trained method on the Hugging Face Hub: `tvr_lightning.hub.push_to_hub`."""
    from tvr_lightning.hub import push_to_hub as push

    return push(checkpoint, name, results=results, private=private, token=token)
