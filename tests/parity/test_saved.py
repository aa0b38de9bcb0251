"""Checkpoints as the released code saves them, with tensors under second names; `-rA` prints what was compared."""

import json

import pytest
import torch
from parity.case import read
from safetensors.torch import save_file

from tvr_lightning.authors.convert import convert
from tvr_lightning.errors import UserError


def test_second_names_of_tensors_are_accepted_only_with_equal_values(saved_case, tmp_path):
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
    first, second = whole["state_dict"], plain["state_dict"]
    differing = [n for n in first | second if n not in first or n not in second or not torch.equal(first[n], second[n])]
    print(f"\n{saved_case}: {len(extra)} second names, {len(first)} tensors, {len(differing)} differ")
    assert not differing
    assert whole["hyper_parameters"] == plain["hyper_parameters"]
    assert whole["hyper_parameters"]["_class_path"].lower().endswith(metadata["method"])
    changed = {extra[-1]: tensors[extra[-1]] + 1}
    added = {"agent.further.weight": torch.ones(2)}
    for other, message in ((changed, extra[-1]), (added, r"1 unexpected: agent\.further\.weight")):
        with pytest.raises(UserError, match=message):
            converted(tensors | other)
