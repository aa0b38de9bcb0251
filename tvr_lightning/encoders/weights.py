"""Read weight files and load them into open_clip models, with an exact report of mismatches."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from open_clip.convert import convert_state_dict
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tvr_lightning.encoders.torchscript import archive_root, read_torchscript
from tvr_lightning.errors import UserError

UNREADABLE = (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError)
"""Errors of torch.load on files that are not checkpoints; text that is read as a pickle can fail at any point."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
OPENAI_FACTS = ("input_resolution", "context_length", "vocab_size")
# Tensors that follow from the architecture; archives list the causal mask among the buffers.
CONSTANTS = (*OPENAI_FACTS, "attn_mask", "text.attn_mask")
LISTED = 20


def read_plain(path: Path) -> Any:
    """Read a file of tensors and plain containers, or an OpenAI archive, without executing anything in it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        root = archive_root(path)
        return read_torchscript(path, root) if root else torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        reason = (str(error) or "empty").splitlines()[0]
        raise UserError(
            f"{path} cannot be read as weights ({reason}). Expected named tensors, as saved by "
            "torch.save(model.state_dict()), in a .safetensors file, or in an OpenAI archive. Code is never executed."
        ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors, which may be nested under `state_dict`, `model_state_dict` or `model`.

    The prefix `module.` from data-parallel training is removed.
    """
    content = read_plain(path)
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{path} contains a {type(content).__name__}, not a state dict of named tensors")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others:
        raise UserError(f"{path}: these entries are not tensors: {listed(others)}; expected a state dict")
    prefix = "module." if all(name.startswith("module.") for name in content) else ""
    return {name.removeprefix(prefix): tensor for name, tensor in content.items()}


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], bool]:
    """Return the weights of a CLIP by name, and whether the file is OpenAI's, and therefore trained with QuickGELU.

    OpenAI's files contain `input_resolution` and the like, or half-precision matrices and float32 norms.
    """
    tensors = read_tensors(path)
    matrix, norm = tensors.get("transformer.resblocks.0.attn.in_proj_weight"), tensors.get("ln_final.weight")
    converted = matrix is not None and norm is not None and (matrix.dtype, norm.dtype) == (torch.float16, torch.float32)
    openai = converted or any(name in tensors for name in OPENAI_FACTS)
    return {name: t for name, t in tensors.items() if name not in CONSTANTS}, openai


def listed(names: Sequence[str]) -> str:
    """Return up to 20 names joined by commas, and the number of further names."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(sorted(names)[:LISTED]) + more


def fitted(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    source: str,
    original: Callable[[str], str] = str,
) -> dict[str, Tensor]:
    """Return tensors in the shapes and types of `expected`; a single element fits in any shape, scalar or (1,).

    Other names and shapes are refused with a list of them, under the `original` names in the file (`source`).
    """

    def fits(tensor: Tensor, wanted: Tensor) -> bool:
        return tensor.shape == wanted.shape or tensor.numel() == wanted.numel() == 1

    problems = {
        "missing": [f"{original(n)} {tuple(t.shape)}" for n, t in expected.items() if n not in tensors],
        "unexpected": [f"{original(n)} {tuple(t.shape)}" for n, t in tensors.items() if n not in expected],
        "of another shape": [
            f"{original(n)}: expected {tuple(t.shape)}, found {tuple(tensors[n].shape)}"
            for n, t in expected.items()
            if n in tensors and not fits(tensors[n], t)
        ],
    }
    found = [f"{len(names)} {kind}: {listed(names)}" for kind, names in problems.items() if names]
    if found:
        raise UserError(f"{source} does not fit the architecture. Tensors {'; '.join(found)}")
    return {name: tensors[name].reshape(wanted.shape).to(wanted.dtype) for name, wanted in expected.items()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load weights into an open_clip model, strictly; open_clip itself would silently resize position embeddings."""
    tensors = dict(convert_state_dict(model, dict(tensors)))
    if isinstance(model, CustomTextCLIP):
        tensors = convert_to_custom_text_state_dict(tensors)
    model.load_state_dict(fitted(tensors, model.state_dict(), source))
