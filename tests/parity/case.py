"""Parity cases: what the authors' code computed from a given checkpoint and given inputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

RESULTS = {"metrics": ("dsl.t2v.similarity", "dsl.v2t.similarity", "qbnorm.similarity")}
"""By method: tensors that are results although their names do not begin with `expected.`."""


class CaseError(ValueError):
    """A case cannot be used; says which file, what is wrong, and what would fit."""


@dataclass
class ParityCase:
    """One `.safetensors` file of a checkpoint, inputs, and what the authors' code made of them.

    Attributes:
        path: the file, for messages.
        method: which implementation, from the metadata.
        config: the switches that differ from the defaults, from the metadata's JSON.
        checkpoint: tensors under the names of the authors' checkpoints (`checkpoint.*` without the prefix).
        inputs: `input.*` without the prefix, and tensors under other names unchanged.
        features: intermediate features (`feature.*` without the prefix).
        expected: `expected.*` without the prefix, tensors that `RESULTS` names, and the numbers of a JSON file of the
            same stem where there is one, each (1,) float64.
    """

    path: Path
    method: str
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    features: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)

    def input(self, name: str) -> Tensor:
        """Return `input.{name}`, of whatever shape.

        Raises:
            CaseError: the case has no such tensor.
        """
        if name not in self.inputs:
            raise CaseError(f"{self.path}: no tensor input.{name}; a {self.method} case needs it")
        return self.inputs[name]


def find_cases(folder: Path, patterns: Iterable[str] = ("*.safetensors",)) -> list[Path]:
    """Return the files in a folder and its subfolders that match a pattern, or the one that is named itself.

    Raises:
        CaseError: the folder does not exist or contains no case.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise CaseError(f"{folder}: no such folder")
    cases = sorted({path for pattern in patterns for path in folder.rglob(pattern)})
    if not cases:
        raise CaseError(f"{folder}: contains no case; expected *.safetensors in it or its subfolders")
    return cases


def load_case(path: Path) -> ParityCase:
    """Read a case.

    Raises:
        CaseError: no such file, no safetensors file, no `method` in its metadata, or nothing expected of it.
    """
    if not path.is_file():
        raise CaseError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  no mapping
    except SafetensorError as error:
        raise CaseError(f"{path}: not a safetensors file ({error})") from error
    if "method" not in metadata:
        raise CaseError(f"{path}: its metadata names no method; expected `method` and, as JSON, `config`")
    case = ParityCase(path, metadata["method"], _config(path, metadata.get("config", "{}")))
    groups = {
        "checkpoint.": case.checkpoint,
        "input.": case.inputs,
        "feature.": case.features,
        "expected.": case.expected,
    }
    for name, tensor in tensors.items():
        prefix = next((p for p in groups if name.startswith(p)), None)
        result = name in RESULTS.get(case.method, ())
        group = case.expected if result else case.inputs if prefix is None else groups[prefix]
        group[name.removeprefix(prefix or "")] = tensor
    numbers = path.with_suffix(".json")
    if numbers.is_file():
        case.expected |= _numbers(json.loads(numbers.read_text(encoding="utf-8")))
    if not case.expected:
        raise CaseError(f"{path}: no expected.* tensor, and no {numbers.name} beside it: nothing to compare")
    return case


def _config(path: Path, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise CaseError(f"{path}: the metadata's config is no JSON ({error})") from error
    if not isinstance(config, dict):
        raise CaseError(f"{path}: the metadata's config is {type(config).__name__}; expected a JSON object")
    return config


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Numbers of nested JSON objects as (1,) tensors, named by their keys joined with dots."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{key}"] = torch.tensor([float(value)], dtype=torch.float64)
    return found
