"""Datasets that the tests of data/ share."""

from pathlib import Path

import pytest

from tvr_lightning.synthetic.generate import synthesize


@pytest.fixture(scope="session")
def synthetic_msrvtt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parent folder of a synthetic MSR-VTT of 16 videos: 10 + 2 to train on, 4 to test."""
    root = tmp_path_factory.mktemp("synthetic")
    synthesize("msrvtt", root, 16, 0, workers=1, progress=False)
    return root
