"""Synthetic datasets: learnable videos with audio, in the files and folders of the real datasets."""

from tvr_lightning.synthetic.generate import synthesize
from tvr_lightning.synthetic.layouts import DatasetName

__all__ = ["DatasetName", "synthesize"]
