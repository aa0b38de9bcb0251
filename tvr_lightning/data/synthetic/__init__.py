"""Synthetic datasets: learnable videos with sound, in the files and folders of the real ones."""

from tvr_lightning.data.synthetic.generate import synthesize
from tvr_lightning.data.synthetic.layouts import DatasetName

__all__ = ["DatasetName", "synthesize"]
