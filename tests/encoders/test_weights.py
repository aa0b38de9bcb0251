"""Files of weights in every layout, none of which can run code."""

import pickle
import zipfile
from pathlib import Path

import open_clip
import pytest
import torch
from torch import nn

from tvr_lightning.encoders.weights import load_weights, read_state_dict, read_torchscript


@pytest.fixture(scope="module")
def model():
    return open_clip.CLIP(**open_clip.get_model_config("tvr-test"))


@pytest.fixture(scope="module")
def tensors(model):
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        self.in_half = nn.Parameter(torch.randn(4, 2).half())
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.register_buffer("vocab_size", torch.tensor(12))
        self.remark = torch.tensor(3.0)  # neither parameter nor buffer

    def forward(self, x):
        return self.layers(x) @ self.in_half.float(), self.transposed * self.remark


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_a_torchscript_archive_has_the_tensors_of_its_module(tmp_path):
    expected, path = Parts(), tmp_path / "parts.pt"
    torch.jit.save(torch.jit.trace(expected, torch.ones(1, 3)), path)
    tensors = read_torchscript(path)
    assert tensors.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    torch.save({"a": torch.ones(2)}, tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("no weights")
    assert read_torchscript(tmp_path / "plain.pt") is read_torchscript(tmp_path / "text.pt") is None


class Trap:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_code_in_a_file_of_weights_does_not_run(tmp_path):
    torch.save({"state_dict": Trap(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil\.pt cannot be read as weights"):
        read_state_dict(tmp_path / "evil.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt", "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps(Trap(tmp_path / "ran"), protocol=2))
        archive.writestr("evil/constants.pkl", b"")
    with pytest.raises(pickle.UnpicklingError, match="which weights do not need"):
        read_torchscript(tmp_path / "archive.pt")
    assert not (tmp_path / "ran").exists()


def test_damaged_and_other_files_are_refused(tmp_path):
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 cut short")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    (tmp_path / "captions.csv").write_text("key,video\n")
    archive = bytearray((tmp_path / "list.pt").read_bytes())
    archive[archive.rfind(b"PK\x01\x02")] ^= 1  # in the zip file's table of contents
    (tmp_path / "flipped.pt").write_bytes(archive)
    for name in ("cut.safetensors", "cut.pt", "captions.csv", "flipped.pt"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read as weights \((?!.*weights_only)"):
            read_state_dict(tmp_path / name)
    with pytest.raises(ValueError, match=r"list\.pt contains a list"):
        read_state_dict(tmp_path / "list.pt")
    torch.save({0: torch.ones(2)}, tmp_path / "numbers.pt")
    with pytest.raises(ValueError, match=r"numbers\.pt: these entries are not named tensors: 0;"):
        read_state_dict(tmp_path / "numbers.pt")


def test_tensors_that_do_not_fit_are_listed(model, tensors):
    wrong = {name: tensor for name, tensor in tensors.items() if name != "ln_final.weight"}
    wrong["head.weight"] = torch.ones(2, 3)
    wrong["visual.proj"] = torch.ones(64, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"file.pt does not fit") as error:
        load_weights(model, wrong, "file.pt")
    for part in (
        "1 missing: ln_final.weight (64,)",
        "1 unexpected: head.weight (2, 3)",
        "1 of another shape: visual.proj: expected (64, 64), found (64, 32)",
    ):
        assert part in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    # Tensors with OpenAI's names are loaded into a model with a text module.
    configuration = open_clip.get_model_config("tvr-test-custom")
    custom = open_clip.CustomTextCLIP(**{k: v for k, v in configuration.items() if k != "custom_text"})
    load_weights(custom, {**tensors, "logit_scale": tensors["logit_scale"].reshape(1)}, "file.pt")
    assert torch.equal(custom.text.ln_final.weight, tensors["ln_final.weight"])
    assert torch.equal(custom.visual.proj, tensors["visual.proj"])
    assert torch.equal(custom.logit_scale, tensors["logit_scale"])
