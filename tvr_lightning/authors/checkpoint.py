"""Read authors' checkpoints, rename their tensors, and report mismatches."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tvr_lightning.authors.families import FAMILIES, Family, recognize
from tvr_lightning.errors import UserError

LISTED = 20
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError)
"""Errors of torch.load on files that are not checkpoints; text that is read as a pickle can fail at any point."""

WRAPPERS = ("state_dict", "model_state_dict", "model")
Module = TypeVar("Module", bound=nn.Module)


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of an authors' checkpoint: `pytorch_model.bin.*`, `.pth`, `.pt` or `.safetensors`.

    Weights may be nested under `state_dict`, `model_state_dict` or `model`. The prefix `module.` from data-parallel
    training is removed. Only tensors and plain containers are unpickled.

    Raises:
        UserError: The file does not exist or does not contain tensors.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        try:
            tensors: object = load_file(path)
        except SafetensorError as error:
            raise UserError(f"{path}: not a safetensors file ({error})") from error
    else:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            reason = (str(error) or "empty").splitlines()[0]
            raise UserError(
                f"{path}: cannot be read as a file of tensors ({reason}). "
                "Only weights are loaded, never code. Save only the model's state_dict()."
            ) from error
    return _tensors(path, tensors)


def _tensors(path: Path, loaded: object) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(wrapper), Mapping):
            loaded = loaded[wrapper]
    if not isinstance(loaded, Mapping) or not loaded:
        raise UserError(f"{path} contains {type(loaded).__name__}; expected a state dict (names to tensors)")
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
    others = [str(name) for name, value in loaded.items() if not isinstance(value, Tensor)]
    if others:
        raise UserError(f"{path}: these entries are not tensors: {listed(others)}; expected a state dict")
    if all(name.startswith("module.") for name in tensors):
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def listed(names: list[str]) -> str:
    """Return up to 20 names joined by commas, and the number of further names."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(sorted(names)[:LISTED]) + more


@dataclass(frozen=True)
class NameMap:
    """Map from the parameter names of released code to those of this package.

    Attributes:
        prefixes: Pairs (theirs, ours) of name prefixes; the first match is replaced, so longer prefixes come first.
        unused: Prefixes of parameters that the released code creates but never uses.
    """

    prefixes: tuple[tuple[str, str], ...]
    unused: tuple[str, ...] = ()

    def __or__(self, other: NameMap) -> NameMap:
        """Return the union of both maps."""
        return NameMap((*self.prefixes, *other.prefixes), (*self.unused, *other.unused))

    def ours(self, name: str) -> str | None:
        """Return our name for one of theirs, or None if there is none."""
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return None

    def theirs(self, name: str) -> str:
        """Return their name for one of ours, or our name if there is none."""
        for theirs, ours in self.prefixes:
            if name.startswith(ours):
                return theirs + name[len(ours) :]
        return name


def family_of(checkpoint: Mapping[str, Tensor], source: str) -> Family:
    """Return the family of a checkpoint, given as tensors by the authors' names.

    Raises:
        UserError: The names do not belong to a known method.
    """
    found = recognize(checkpoint)
    if found is None:
        raise UserError(f"{source}: no known method has these tensors: {listed(list(checkpoint))}")
    return found


def check_family(method: str, checkpoint: Mapping[str, Tensor], source: str) -> None:
    """Refuse a checkpoint of another method.

    Args:
        method: Expected method, as on the command line.
        checkpoint: Tensors by the authors' names.
        source: Name of the file, for the error.

    Raises:
        UserError: The names belong to another or an unknown method.
    """
    found = family_of(checkpoint, source)
    if found.method != method:
        title = next((family.title for family in FAMILIES if family.method == method), method)
        marks = listed([n for n in checkpoint if n.startswith(found.marks) and not n.startswith("clip.")])
        detail = f" ({marks})" if marks else ""
        raise UserError(
            f"{source}: these are {found.title}'s names{detail}, not {title}'s. Convert it with --method {found.method}"
        )


def check_sizes(found: tuple[int, int], wanted: tuple[int, int], source: str) -> None:
    """Refuse numbers of words and frames that differ from those of a checkpoint's matrices.

    Raises:
        UserError: The numbers differ; the message contains the expected ones.
    """
    if found != wanted:
        raise UserError(
            f"{source}: its matrices are for {found[0]} words and {found[1]} frames, not for {wanted[0]} words and "
            f"{wanted[1]} frames. Pass --words {found[0]} --frames {found[1]}"
        )


def rename(
    checkpoint: Mapping[str, Tensor], names: NameMap, expected: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Return the checkpoint's tensors under our names, with the shapes and types of `expected`.

    Tensors with a single element match in any shape, scalar or (1,).

    Args:
        checkpoint: Tensors by the authors' names.
        names: Map from their names to ours.
        expected: Our state dict, for names, shapes and types.
        source: Name of the file, for the error.

    Raises:
        UserError: Names are unexpected or missing, or shapes differ; the message lists all of them by the authors'
            names.
    """
    renamed: dict[str, Tensor] = {}
    unexpected, shapes, arrived = [], [], set()
    for name, tensor in checkpoint.items():
        if names.unused and name.startswith(names.unused):
            continue
        ours = names.ours(name)
        if ours is None or ours not in expected:
            unexpected.append(name)
            continue
        wanted = expected[ours]
        arrived.add(ours)
        if tensor.shape != wanted.shape and not tensor.numel() == wanted.numel() == 1:
            shapes.append(f"{name} is {tuple(tensor.shape)}, expected {tuple(wanted.shape)}")
        else:
            renamed[ours] = tensor.reshape(wanted.shape).to(wanted.dtype)
    missing = [names.theirs(name) for name in expected if name not in arrived]
    problems = [
        f"{len(found)} {what}: {listed(found)}"
        for what, found in (("unexpected", unexpected), ("missing", missing), ("of another shape", shapes))
        if found
    ]
    if problems:
        raise UserError(f"{source}: the checkpoint does not fit. Tensors {'; '.join(problems)}")
    return renamed


def load(module: Module, checkpoint: Mapping[str, Tensor], names: NameMap, source: str) -> Module:
    """Load the checkpoint's tensors into a module and return it in evaluation mode; errors as in `rename`."""
    module.load_state_dict(rename(checkpoint, names, module.state_dict(), source))
    return module.eval()
