"""Checkpoints as the released code saves them, with tensors under second names; `-rA` prints what was compared."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tvr_lightning.authors.convert import convert
from tvr_lightning.errors import UserError


def read(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118  not a mapping


def converted(tensors, folder, name):
    save_file(tensors, folder / f"{name}.safetensors")
    convert(folder / f"{name}.safetensors", folder / f"{name}.ckpt")
    return torch.load(folder / f"{name}.ckpt", weights_only=True)


def test_second_names_change_nothing(saved_case, tmp_path):
    tensors, metadata = read(saved_case)
    extra = json.loads(metadata["extra"])
    if not extra or set(extra) - tensors.keys():
        pytest.fail(f"{saved_case}: its metadata's extra does not name tensors of the file", pytrace=False)
    try:
        whole = converted(tensors, tmp_path, "whole")
        plain = converted({name: tensor for name, tensor in tensors.items() if name not in extra}, tmp_path, "plain")
    except UserError as error:
        pytest.fail(str(error), pytrace=False)
    first, second = whole["state_dict"], plain["state_dict"]
    differing = [n for n in first | second if n not in first or n not in second or not torch.equal(first[n], second[n])]
    print(f"\n{saved_case}: {len(extra)} second names, {len(first)} tensors, {len(differing)} differ")
    if differing:
        pytest.fail(f"{saved_case}: {len(differing)} tensors differ: {', '.join(differing)}", pytrace=False)
    assert whole["hyper_parameters"] == plain["hyper_parameters"]
    assert whole["hyper_parameters"]["_class_path"].lower().endswith(metadata["method"])


def test_a_second_name_with_other_values_is_refused_by_name(saved_case, tmp_path):
    tensors, metadata = read(saved_case)
    changed = json.loads(metadata["extra"])[-1]
    with pytest.raises(UserError, match=changed):
        converted(tensors | {changed: tensors[changed] + 1}, tmp_path, "changed")


def test_a_further_name_is_refused_by_name(saved_case, tmp_path):
    tensors, _ = read(saved_case)
    with pytest.raises(UserError, match=r"1 unexpected: agent\.further\.weight"):
        converted(tensors | {"agent.further.weight": torch.ones(2)}, tmp_path, "further")
