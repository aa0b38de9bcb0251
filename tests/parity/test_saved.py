"""Checkpoints as the released code saves them, with tensors under second names; `-rA` prints what was compared."""

import json

import torch
from parity.case import read
from safetensors.torch import save_file

from tvr_lightning.authors.convert import convert


def test_second_names_of_equal_tensors_change_nothing(saved_case, tmp_path):
    tensors, metadata = read(saved_case)
    extra = json.loads(metadata["extra"])
    assert extra
    assert set(extra) <= tensors.keys()

    def converted(tensors):
        save_file(tensors, tmp_path / "saved.safetensors")
        convert(tmp_path / "saved.safetensors", tmp_path / "out.ckpt")
        return torch.load(tmp_path / "out.ckpt", weights_only=True)

    whole = converted(tensors)
    plain = converted({name: tensor for name, tensor in tensors.items() if name not in extra})
    print(f"\n{saved_case}: {len(extra)} second names, {len(plain['state_dict'])} tensors")
    torch.testing.assert_close(whole["state_dict"], plain["state_dict"], rtol=0, atol=0)
    assert whole["hyper_parameters"] == plain["hyper_parameters"]
    assert whole["hyper_parameters"]["_class_path"].lower().endswith(metadata["method"])
