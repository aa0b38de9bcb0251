"""Read weight files and load them into open_clip models, with an exact report of mismatches."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.convert import convert_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tvr_lightning.encoders.torchscript import archive_root, read_torchscript
from tvr_lightning.errors import UserError

# Tensors in OpenAI's archives in addition to the weights.
OPENAI_FACTS = ("input_resolution", "context_length", "vocab_size")
# Tensors that follow from the architecture; archives list the causal mask among the buffers.
CONSTANTS = (*OPENAI_FACTS, "attn_mask", "text.attn_mask")
LISTED = 8


@dataclass
class StateDict:
    """Weights from a file.

    Attributes:
        tensors: Tensors by name, in the dtypes of the file, without OpenAI's `input_resolution` and the like; of any
            shape, `logit_scale` is a scalar or (1,).
        openai: Whether the file is OpenAI's, and therefore trained with QuickGELU: it contains `input_resolution` and
            the like, or half-precision matrices and float32 norms as left by `convert_weights`.
    """

    tensors: dict[str, Tensor]
    openai: bool


def read_state_dict(path: Path) -> StateDict:
    """Read an OpenAI archive or state dict, or an open_clip checkpoint, without executing anything in it.

    Raises:
        UserError: The file is damaged, or contains code or anything else than named tensors.
    """
    root = archive_root(path)
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        elif root is not None:
            content = read_torchscript(path, root)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read as weights: {error}. Expected an OpenAI archive or state dict, or an open_clip "
            "checkpoint (.pt, .bin, .safetensors). Files are read without executing code from them."
        ) from error
    tensors = _named_tensors(path, content)
    openai = any(name in tensors for name in OPENAI_FACTS) or _converted(tensors)
    return StateDict({name: t for name, t in tensors.items() if name not in CONSTANTS}, openai)


def _named_tensors(path: Path, content: Any) -> dict[str, Tensor]:
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{path} contains a {type(content).__name__}, not a state dict of named tensors")
    if all(name.startswith("module.") for name in content):
        content = {name.removeprefix("module."): tensor for name, tensor in content.items()}
    return dict(content)


def _converted(tensors: dict[str, Tensor]) -> bool:
    matrix, norm = tensors.get("transformer.resblocks.0.attn.in_proj_weight"), tensors.get("ln_final.weight")
    return matrix is not None and norm is not None and (matrix.dtype, norm.dtype) == (torch.float16, torch.float32)


def load_weights(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    """Load weights into an open_clip model; names must match exactly.

    Args:
        model: `open_clip.CLIP` or `open_clip.CustomTextCLIP`.
        tensors: Tensors by name, in the model's shapes (`logit_scale`: scalar or (1,)); other known layouts are
            renamed as in open_clip.
        source: Source of the tensors, for the error.

    Raises:
        UserError: Names or shapes differ; the message lists expected and actual ones.
    """
    tensors = dict(convert_state_dict(model, tensors))
    if isinstance(model, open_clip.CustomTextCLIP) and "text_projection" in tensors:
        tensors = {_text_name(name): tensor for name, tensor in tensors.items()}
    expected = model.state_dict()
    if "logit_scale" in tensors and tensors["logit_scale"].numel() == 1:
        tensors["logit_scale"] = tensors["logit_scale"].reshape(expected["logit_scale"].shape)  # scalar or (1,)
    missing = [f"{name} {tuple(t.shape)}" for name, t in expected.items() if name not in tensors]
    unexpected = [f"{name} {tuple(t.shape)}" for name, t in tensors.items() if name not in expected]
    shapes = [
        f"{name}: expected {tuple(t.shape)}, found {tuple(tensors[name].shape)}"
        for name, t in expected.items()
        if name in tensors and tensors[name].shape != t.shape
    ]
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:LISTED])}{' ...' if len(names) > LISTED else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if problems:
        raise UserError(f"{source} does not fit the architecture. Tensors {'; '.join(problems)}")
    model.load_state_dict(tensors)


def _text_name(name: str) -> str:
    parts = ("text_projection", "positional_embedding", "token_embedding", "transformer", "ln_final")
    return f"text.{name}" if name.startswith(parts) else name
