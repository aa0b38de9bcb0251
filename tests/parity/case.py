"""Parity cases: what the authors' code computed from a given checkpoint and given inputs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

RESULTS = {"metrics": ("dsl.t2v.similarity", "dsl.v2t.similarity", "qbnorm.similarity")}
"""By method: tensors that are results although their names do not begin with `expected.`."""


class CaseError(ValueError):
    """A case cannot be used."""


@dataclass
class ParityCase:
    """One `.safetensors` file of a checkpoint, inputs, and what the authors' code made of them.

    Attributes:
        path: File.
        method: Method, from the metadata.
        config: Switches that differ from the defaults, from the metadata's JSON.
        checkpoint: Tensors under the names of the authors' checkpoints (`checkpoint.*` without the prefix).
        inputs: `input.*` without the prefix, and tensors under other names unchanged.
        features: Intermediate features (`feature.*` without the prefix).
        expected: `expected.*` without the prefix, tensors that `RESULTS` names, and the numbers of a JSON file of the
            same stem, if there is one, each (1,) float64.
    """

    path: Path
    method: str
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    features: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)

    def input(self, name):
        if name not in self.inputs:
            raise CaseError(f"{self.path}: no tensor input.{name}; a {self.method} case needs it")
        return self.inputs[name]


def read(path):
    """Return the tensors and the metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  no mapping


def load_case(path):
    """Read a case; CaseError if it cannot be read, names no method, or expects nothing."""
    try:
        tensors, metadata = read(path)
        config = json.loads(metadata.get("config", "{}"))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CaseError(f"{path}: not a safetensors file with a config in JSON ({error})") from error
    if "method" not in metadata:
        raise CaseError(f"{path}: its metadata names no method; expected `method` and, as JSON, `config`")
    case = ParityCase(path, metadata["method"], config)
    groups = {"checkpoint": case.checkpoint, "input": case.inputs, "feature": case.features, "expected": case.expected}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".")
        if name in RESULTS.get(case.method, ()):
            case.expected[name] = tensor
        elif prefix in groups:
            groups[prefix][rest] = tensor
        else:
            case.inputs[name] = tensor
    numbers = path.with_suffix(".json")
    if numbers.is_file():
        case.expected |= _numbers(json.loads(numbers.read_text(encoding="utf-8")))
    if not case.expected:
        raise CaseError(f"{path}: no expected.* tensor, and no {numbers.name} beside it: nothing to compare")
    return case


def _numbers(tree, prefix=""):
    """Numbers of nested JSON objects as (1,) tensors, named by their keys joined with dots."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{key}"] = torch.tensor([float(value)], dtype=torch.float64)
    return found
