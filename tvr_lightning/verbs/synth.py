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
    workers: Count | None = None,
) -> int:
    """Write a synthetic dataset of real mp4 files in a dataset's own layout.

    Args:
        dataset: whose layout and files.
        root: parent folder; the dataset gets its own folder below it.
        videos: how many videos in all; a fifth is held out for the test.
        seed: the same seed gives the same dataset.
        workers: processes that render; by default one per core.
    """
    print(f"Wrote {synthesize(dataset, root, videos, seed, workers=workers or os.cpu_count() or 1)}")
    return 0
