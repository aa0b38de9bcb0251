"""Untrusted checkpoints are read without building, importing or executing the classes that they name."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tvr_lightning import __version__
from tvr_lightning.training.checkpoints import RECORD, CheckpointError, read_checkpoint, trusted_sections


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


METHOD, ENCODER = "tvr_lightning.methods.CLIP4Clip", "tvr_lightning.encoders.TinyClipEncoder"
STRANGER = {"class_path": "strangers.Encoder"}
REMOTE = {"weights": "strangers/model", "trust_remote_code": True}
LOCAL = {"weights": "tvr_lightning.model", "trust_remote_code": True}


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """A module of an untrusted user that must not be imported."""
    (tmp_path / "strangers.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    assert "strangers" not in sys.modules


@pytest.mark.usefixtures("strangers")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"_class_path": "strangers.CLIP4Clip"}, "strangers"),
        ({"encoder": STRANGER}, "strangers"),
        ({"parts": [[{"a": {"class_path": "strangers.inner.Part"}}]]}, "strangers.inner"),
        ({"encoder": {"class_path": ENCODER, "dict_kwargs": {"a": STRANGER}}}, "strangers"),
        ({"encoder": {"class_path": ENCODER, "init_args": REMOTE}}, "strangers/model"),
        ({"encoder": {"class_path": ENCODER, "init_args": LOCAL}}, "./tvr_lightning.model"),
    ],
)
def test_code_from_elsewhere_needs_trust(options, name):
    for content in ({"hyper_parameters": options}, {"hyper_parameters": {}, "datamodule_hyper_parameters": options}):
        with pytest.raises(CheckpointError, match=rf"a\.ckpt would run the code of {name},.* pass --trust {name} "):
            trusted_sections(Path("a.ckpt"), content, ["strange", "strangers.inn"])


def test_trusted_code_is_allowed():
    options = {"encoder": STRANGER, "extra": REMOTE}
    assert trusted_sections(Path("a.ckpt"), {"hyper_parameters": options}, ["strangers", "strangers/model"])


@pytest.mark.usefixtures("strangers")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tuning": "strangers.Encoder"}, "model.init_args.tuning is the text 'strangers.Encoder'"),
        ({"encoder": "{'cl\\x61ss_path': strangers.Encoder}"}, "model.init_args.encoder is the text"),
        ({"contrast": "strangers.Encoder"}, "contrast is the text"),
        ({"optimizer": "strangers.Encoder"}, "optimizer is the text"),
        ({"evaluation": "{normalization: strangers.Encoder}"}, "evaluation is the text"),
        ({"evaluation": {"normalization": "strangers.Encoder"}}, "evaluation.normalization is the text"),
        ({"evaluation": {"metrics": ["strangers.Encoder"]}}, "metrics is the text"),
        ({"encoder": {"class_path": ENCODER, "init_args": "tuning: strangers.Encoder"}}, "has no option init_args"),
        ({"encoder.class_path": "strangers.Encoder"}, "CLIP4Clip has no option class_path"),
        ({"encoder": {"class_path": "tvr_lightning.encoders.clip.Any"}}, "cannot be found"),
        ({"encoder": {"class_path": "tvr_lightning.encoders.clip.Path"}}, "cannot be found"),
    ],
)
def test_text_and_unknown_options_that_the_parser_might_import_are_refused(options, message):
    with pytest.raises(CheckpointError) as error:
        trusted_sections(Path("a.ckpt"), {"hyper_parameters": {"_class_path": METHOD, **options}})
    assert str(error.value).startswith("a.ckpt")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("record", "writer"), [({"version": "0.0.9"}, "0.0.9"), ({}, "a version that it does not record")]
)
def test_an_option_that_no_longer_exists_is_named_with_the_version_of_the_file(record, writer):
    content = {"hyper_parameters": {"_class_path": METHOD, "encoder": {"class_path": ENCODER, "init_args": {"hue": 1}}}}
    message = f"TinyClipEncoder has no option hue in tvr-lightning {__version__}, and the file was written by {writer}."
    with pytest.raises(CheckpointError, match=re.escape(message)):
        trusted_sections(Path("a.ckpt"), content | {RECORD: record})
