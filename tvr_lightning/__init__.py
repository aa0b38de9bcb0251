"""Text-video retrieval papers, reproduced with PyTorch Lightning."""

from tvr_lightning._torchvision import mend_on_import
from tvr_lightning._version import __version__

mend_on_import()

__all__ = ["__version__"]
