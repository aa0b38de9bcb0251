"""Read weight files and load them into open_clip models, with an exact report of mismatches."""

import ast
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from open_clip.convert import convert_state_dict
from open_clip.model import CustomTextCLIP, convert_to_custom_text_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from tvr_lightning.errors import UserError, abbreviated

WRAPPERS = ("state_dict", "model_state_dict", "model")
OPENAI_FACTS = ("input_resolution", "context_length", "vocab_size")
# Tensors that follow from the architecture; archives list the causal mask among the buffers.
CONSTANTS = (*OPENAI_FACTS, "attn_mask", "text.attn_mask")
STORAGES = {"FloatStorage": torch.float32, "HalfStorage": torch.float16, "LongStorage": torch.int64}
CLASS_LISTS = r"^class {}\(Module\):\n\s+__parameters__ = (\[.*\])\n\s+__buffers__ = (\[.*\])\n"


def read_plain(path: Path) -> Any:
    """Read a file of tensors and plain containers, or an OpenAI archive, without executing anything in it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = read_torchscript(path)
        return torch.load(path, map_location="cpu", weights_only=True) if tensors is None else tensors
    except Exception as error:  # text that is read as a pickle, and a damaged archive, can fail at any point
        # torch advises loading without weights_only, which would run the file's code.
        reason = (str(error).rpartition("WeightsUnpickler error: ")[2].strip() or "empty").splitlines()[0]
        raise UserError(
            f"{path} cannot be read as weights ({reason}). Expected named tensors, as saved by "
            "torch.save(model.state_dict()), in a .safetensors file, or in an OpenAI archive. Code is never executed."
        ) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read named tensors, perhaps nested (`WRAPPERS`), without the prefix `module.` from data-parallel training."""
    content = read_plain(path)
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"{path} contains a {type(content).__name__}, not a state dict of named tensors")
    others = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if others:
        raise UserError(
            f"{path}: these entries are not named tensors: {abbreviated(sorted(others), 20)}; expected a state dict"
        )
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


def fitted(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    source: str,
    original: Callable[[str], str] = str,
) -> dict[str, Tensor]:
    """Return tensors in the shapes and types of `expected`; a single element fits in any shape, scalar or (1,).

    Other names and shapes are refused with a list of them, under the `original` names in the file (`source`).
    """
    problems = {
        "missing": [f"{original(n)} {tuple(t.shape)}" for n, t in expected.items() if n not in tensors],
        "unexpected": [f"{original(n)} {tuple(t.shape)}" for n, t in tensors.items() if n not in expected],
        "of another shape": [
            f"{original(n)}: expected {tuple(t.shape)}, found {tuple(tensors[n].shape)}"
            for n, t in expected.items()
            if n in tensors and tensors[n].shape != t.shape and not (tensors[n].numel() == t.numel() == 1)
        ],
    }
    if found := [f"{len(names)} {kind}: {abbreviated(sorted(names), 20)}" for kind, names in problems.items() if names]:
        raise UserError(f"{source} does not fit the architecture. Tensors {'; '.join(found)}")
    return {name: tensors[name].reshape(wanted.shape).to(wanted.dtype) for name, wanted in expected.items()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load weights into an open_clip model, strictly; open_clip itself would silently resize position embeddings."""
    tensors = dict(convert_state_dict(model, dict(tensors)))
    if isinstance(model, CustomTextCLIP):
        tensors = convert_to_custom_text_state_dict(tensors)
    model.load_state_dict(fitted(tensors, model.state_dict(), source))


class _Module:
    """Inert replacement of an archived class, which only stores attributes."""

    names: set[str] | None = None  # of its parameters and buffers; None if the archive has no list: all tensors


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    # as_strided checks the bounds of the storage; the clone makes parameters independent of shared memory
    return torch.as_strided(storage, size, stride, offset).clone()


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler of tensors and `_Module`s; any other global raises an error, so that a pickle cannot call anything."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(archive.open(f"{root}/data.pkl"))
        self._archive, self._root = archive, root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> type | Callable[..., Any] | torch.dtype:
        if module == "__torch__" or module.startswith("__torch__."):
            return type(name, (_Module,), {"names": self._state_names(module, name)})
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.jit._pickle" and name.startswith("build_"):
            return list
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"the archive imports {module}.{name}, which weights do not need")

    def _state_names(self, module: str, name: str) -> set[str] | None:
        path = f"{self._root}/code/{module.replace('.', '/')}.py"
        if path not in self._archive.namelist():
            return None
        code = self._archive.read(path).decode()
        lists = re.search(CLASS_LISTS.format(re.escape(name)), code, re.MULTILINE)
        return {entry for text in lists.groups() for entry in ast.literal_eval(text)} if lists else None

    def persistent_load(self, identity: tuple[str, torch.dtype, str, str, int]) -> Tensor:
        _, dtype, key, _, _ = identity
        if key not in self._storages:
            data = bytearray(self._archive.read(f"{self._root}/data/{key}"))
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return self._storages[key]


def read_torchscript(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a TorchScript archive without running the program inside it, or None for other files.

    OpenAI published CLIP in this format. `torch.load(weights_only=True)` refuses it, and `torch.jit.load` would execute
    the archived code and is deprecated. The zip file contains one folder with `constants.pkl`, `data.pkl` (the module
    tree), `data/<key>` (raw little-endian storages) and `code/` (the program, whose classes list their parameters and
    buffers).
    """
    if not zipfile.is_zipfile(path):
        return None
    tensors: dict[str, Tensor] = {}

    def collect(module: _Module, prefix: str) -> None:
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and (module.names is None or name in module.names):
                tensors[prefix + name] = value
            elif isinstance(value, _Module):
                collect(value, f"{prefix}{name}.")

    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        roots = [name.split("/")[0] for name in names if name.endswith("/constants.pkl") and name.count("/") == 1]
        if not roots or f"{roots[0]}/data.pkl" not in names:
            return None
        collect(_TensorUnpickler(archive, roots[0]).load(), "")
    return tensors
