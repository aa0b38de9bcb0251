"""Synthetic datasets: learnable videos with sound, in the files and folders of the real ones."""

from tvr_lightning.synthetic.generate import synthesize
from tvr_lightning.synthetic.layouts import DatasetName

__all__ = ["DatasetName", "synthesize"]
