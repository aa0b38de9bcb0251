"""`tvr data synth`: a synthetic dataset; it needs no model, and none is imported for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from tvr_lightning.places import NewFolder
from tvr_lightning.ranges import Count, Range
from tvr_lightning.synthetic.generate import LEAST_VIDEOS, synthesize
from tvr_lightning.synthetic.layouts import DatasetName


def data_synth(
    dataset: DatasetName,
    root: NewFolder = Path("fixture"),
    videos: Annotated[int, Range(at_least=LEAST_VIDEOS)] = 500,
    seed: int = 0,
    num_workers: Count | None = None,
) -> int:
    """Write a synthetic dataset of playable mp4 files in the layout of a real dataset.

    Args:
        dataset: dataset whose layout is used.
        root: parent folder, in which the dataset gets its own folder.
        videos: total number of videos; a fifth is the test split.
        seed: random seed; the same seed gives the same dataset.
        num_workers: number of processes that render; by default one per core.
    """
    print(f"Wrote {synthesize(dataset, root, videos, seed, workers=num_workers or os.cpu_count() or 1)}")
    return 0
