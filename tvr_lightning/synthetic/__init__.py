"""Synthetic datasets: learnable videos with audio, in the files and folders of the real datasets."""

from tvr_lightning.option_types import DatasetName
from tvr_lightning.synthetic.generate import synthesize

__all__ = ["DatasetName", "synthesize"]
