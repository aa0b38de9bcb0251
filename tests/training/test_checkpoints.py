"""Checkpoints from anybody are read without building, importing or executing what they name."""

import sys
from pathlib import Path

import pytest
import torch

from tvr_lightning.training.checkpoints import CheckpointError, check_classes, read_checkpoint


def saved(path: Path, **content) -> Path:
    torch.save({"state_dict": {}, **content}, path)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such checkpoint"),
        (b"", r"last\.ckpt: cannot be read"),
        (b"not a checkpoint", r"last\.ckpt: cannot be read"),
        (b"PK\x03\x04 half of an archive", r"last\.ckpt: cannot be read"),
        ({"state_dict": {}}, "no hyper_parameters"),
    ],
)
def test_what_is_not_a_checkpoint_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "last.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(path)


def test_a_class_of_another_module_is_refused_before_its_import_unless_the_user_names_it(tmp_path, monkeypatch):
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
    ("hyper_parameters", "message"),
    [
        (
            {"hyper_parameters": {"_class_path": "tvr_lightning.methods.GARE", "parts": [{"class_path": "os.system"}]}},
            r"os\.system",
        ),
        ({"hyper_parameters": {}, "datamodule_hyper_parameters": {"_class_path": "a.Data"}}, r"a\.Data"),
    ],
)
def test_data_and_objects_within_lists_are_looked_at_too(tmp_path, hyper_parameters, message):
    path = saved(tmp_path / "last.ckpt", **hyper_parameters)
    with pytest.raises(CheckpointError, match=message):
        check_classes(path, read_checkpoint(path))
