"""Checkpoints from anybody are read without building, importing or executing what they name."""

import sys
from pathlib import Path

import pytest
import torch

from tvr_lightning.training.checkpoints import CheckpointError, check_classes, read_checkpoint


def saved(path: Path, **content) -> Path:
    torch.save({"state_dict": {}, **content}, path)
    return path


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half of an archive"])
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, content):
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"last\.ckpt: cannot be read"):
        read_checkpoint(path)


def test_an_absent_checkpoint_and_one_without_hyperparameters_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match="no hyper_parameters"):
        read_checkpoint(saved(tmp_path / "bare.ckpt"))


def test_a_class_of_another_module_is_refused_before_its_import_unless_the_user_names_it(tmp_path, monkeypatch):
    (tmp_path / "strangers.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    encoder = {"class_path": "strangers.Encoder", "init_args": {"width": 64}}
    path = saved(
        tmp_path / "last.ckpt",
        hyper_parameters={"_class_path": "tvr_lightning.methods.CLIP4Clip", "encoder": encoder},
    )
    content = read_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"names strangers\.Encoder.*--trust strangers"):
        check_classes(path, content)
    with pytest.raises(CheckpointError, match=r"names strangers\.Encoder"):
        check_classes(path, content, trusted=["strange"])
    check_classes(path, content, trusted=["strangers"])
    assert "strangers" not in sys.modules


def test_data_and_objects_within_lists_are_looked_at_too(tmp_path):
    path = saved(
        tmp_path / "last.ckpt",
        hyper_parameters={"_class_path": "tvr_lightning.methods.GARE", "parts": [{"class_path": "os.system"}]},
    )
    with pytest.raises(CheckpointError, match=r"os\.system"):
        check_classes(path, read_checkpoint(path))
    path = saved(tmp_path / "data.ckpt", hyper_parameters={}, datamodule_hyper_parameters={"_class_path": "a.Data"})
    with pytest.raises(CheckpointError, match=r"a\.Data"):
        check_classes(path, read_checkpoint(path))
