"""Untrusted checkpoints are read without building, importing or executing the classes that they name."""

import sys

import pytest
import torch

from tvr_lightning.training.checkpoints import CheckpointError, check_classes, read_checkpoint


def saved(path, **content):
    torch.save({"state_dict": {}, **content}, path)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such checkpoint"),
        (b"", r"last\.ckpt: cannot be read"),
        (b"PK\x03\x04 half of an archive", r"last\.ckpt: cannot be read"),
        ({"state_dict": {}}, "no hyper_parameters"),
    ],
)
def test_other_files_are_rejected(tmp_path, content, message):
    path = tmp_path / "last.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def test_a_class_of_an_untrusted_module_is_rejected_before_its_import(tmp_path, monkeypatch):
    (tmp_path / "strangers.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    encoder = {"class_path": "strangers.Encoder", "init_args": {"width": 64}}
    path = saved(
        tmp_path / "last.ckpt", hyper_parameters={"_class_path": "tvr_lightning.methods.CLIP4Clip", "encoder": encoder}
    )
    content = read_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"names strangers\.Encoder.*--trust strangers"):
        check_classes(path, content)
    with pytest.raises(CheckpointError, match=r"names strangers\.Encoder"):
        check_classes(path, content, trusted=["strange"])
    check_classes(path, content, trusted=["strangers"])
    assert "strangers" not in sys.modules


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"hyper_parameters": {"parts": [{"class_path": "os.system"}]}}, r"os\.system"),
        ({"hyper_parameters": {}, "datamodule_hyper_parameters": {"_class_path": "a.Data"}}, r"a\.Data"),
    ],
)
def test_classes_of_data_and_in_lists_are_checked_too(tmp_path, content, message):
    path = saved(tmp_path / "last.ckpt", **content)
    with pytest.raises(CheckpointError, match=message):
        check_classes(path, read_checkpoint(path))
