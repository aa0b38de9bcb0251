"""Text-video retrieval papers, reproduced with PyTorch Lightning."""

from tvr_lightning._torchvision import declare_missing_operators
from tvr_lightning._version import __version__

declare_missing_operators()

__all__ = ["__version__"]
