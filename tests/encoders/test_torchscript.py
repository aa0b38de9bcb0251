import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tvr_lightning.encoders.weights import archive_root, read_torchscript


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
def test_tensors_equal_the_state_dict_of_the_archived_module(tmp_path):
    module = Parts()
    path = tmp_path / "parts.pt"
    torch.jit.save(torch.jit.trace(module, torch.ones(1, 3)), path)
    root = archive_root(path)
    assert root is not None
    tensors = read_torchscript(path, root)
    expected = module.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def test_other_files_are_no_archives(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("no weights")
    assert archive_root(tmp_path / "plain.pt") is None
    assert archive_root(tmp_path / "text.pt") is None


class Trap:
    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_an_archive_that_calls_functions_is_refused_unrun(tmp_path):
    path = tmp_path / "evil.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps(Trap(tmp_path / "ran"), protocol=2))
        archive.writestr("evil/constants.pkl", b"")
    with pytest.raises(pickle.UnpicklingError, match="which weights do not need"):
        read_torchscript(path, "evil")
    assert not (tmp_path / "ran").exists()
