"""Datasets as people hold them, brought into the layout that this package reads: `tvr data import`, `tvr data download`."""
