"""Fixtures of the tests of datasets."""

import pytest


@pytest.fixture
def real_vatex(test_data, tmp_path):
    """Parent folder of the real VATEX, without the captions of its training videos."""
    source, folder = test_data / "annotations" / "vatex", tmp_path / "real" / "vatex"
    folder.mkdir(parents=True)
    for name in ("train_list.txt", "val_list.txt", "test_list.txt"):
        (folder / name).symlink_to(source / name)
    (folder / "vatex_data.json").symlink_to(source / "vatex_data.VAL_ONLY.json")
    (folder / "vatex_validation_v1.0.json").symlink_to(source / "vatex_validation_v1.0.FROM_GT.json")
    return str(folder.parent)
