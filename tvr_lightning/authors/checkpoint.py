"""Authors' checkpoints: reading them, renaming their tensors, and saying what does not fit."""

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
"""What torch.load raises on files that are not its own; text, taken for a pickle, breaks it anywhere."""

WRAPPERS = ("state_dict", "model_state_dict", "model")
Module = TypeVar("Module", bound=nn.Module)


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of an authors' checkpoint: `pytorch_model.bin.*`, `.pth`, `.pt` or `.safetensors`.

    Dictionaries that hold the weights below `state_dict`, `model_state_dict` or `model` are opened, and the `module.`
    that data-parallel training puts before every name is dropped. Files are never unpickled beyond tensors and plain
    containers.

    Raises:
        UserError: no such file, or no file of tensors.
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
    """Return names joined by commas, the first 20 and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(sorted(names)[:LISTED]) + more


@dataclass(frozen=True)
class NameMap:
    """How a released code's parameter names become ours.

    Attributes:
        prefixes: (theirs, ours) beginnings of names; the first that fits is replaced, so that longer ones stand first.
        unused: beginnings of names that the released code creates and never uses.
    """

    prefixes: tuple[tuple[str, str], ...]
    unused: tuple[str, ...] = ()

    def __or__(self, other: NameMap) -> NameMap:
        """Return the map that knows the names of both."""
        return NameMap((*self.prefixes, *other.prefixes), (*self.unused, *other.unused))

    def ours(self, name: str) -> str | None:
        """Return our name for theirs; None where there is none."""
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return None

    def theirs(self, name: str) -> str:
        """Return their name for ours; ours where they have none."""
        for theirs, ours in self.prefixes:
            if name.startswith(ours):
                return theirs + name[len(ours) :]
        return name


def family_of(checkpoint: Mapping[str, Tensor], source: str) -> Family:
    """Return the family that a checkpoint belongs to.

    Args:
        checkpoint: Tensors by the authors' names.
        source: The file, for the error.

    Raises:
        UserError: The names are not those of any known method.
    """
    found = recognize(checkpoint)
    if found is None:
        raise UserError(f"{source}: no known method has these tensors: {listed(list(checkpoint))}")
    return found


def check_family(method: str, checkpoint: Mapping[str, Tensor], source: str) -> None:
    """Refuse a checkpoint that belongs to another method.

    Args:
        method: Method whose names are expected, as on the command line.
        checkpoint: tensors by the authors' names.
        source: the file, for the error.

    Raises:
        UserError: another method's names, or nobody's.
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
    """Refuse other numbers of words and frames than a checkpoint's matrices are for.

    Raises:
        UserError: says which they are for.
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

    Tensors of one number fit each other, be they scalar or (1,).

    Args:
        checkpoint: tensors by the authors' names.
        names: the map from their names to ours.
        expected: our state dict, for names, shapes and types.
        source: the file, for the error.

    Raises:
        UserError: names are unexpected or missing, or shapes differ; lists all of them, under the
            authors' names.
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
    """Give a module the checkpoint's tensors and return it in evaluation mode.

    Raises:
        UserError: names are unexpected or missing, or shapes differ.
    """
    module.load_state_dict(rename(checkpoint, names, module.state_dict(), source))
    return module.eval()
