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

    The prefix of a tensor's name determines its group, in which it has the rest of the name; tensors without a known
    prefix are inputs. `config` has the switches that differ from the defaults. `expected` also has the numbers of a
    JSON file of the same stem, each (1,) float64.
    """

    path: Path
    method: str
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    features: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)


def read(path):
    """Return the tensors and the metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  no mapping


def load_case(path):
    """Read a case; CaseError if it cannot be read, names no method, or expects nothing."""
    try:
        tensors, metadata = read(path)
        case = ParityCase(path, metadata["method"], json.loads(metadata.get("config", "{}")))
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise CaseError(f"{path}: not a safetensors file with `method` and a JSON `config` ({error})") from error
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
        raise CaseError(f"{path}: no expected.* tensor, and no {numbers.name}: nothing to compare")
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
