"""Read the tensors of a TorchScript archive without running the program inside it.

OpenAI published CLIP as TorchScript archives. `torch.load(weights_only=True)` refuses them, and `torch.jit.load` would
execute the archived code and is deprecated. An archive is a zip file of `data.pkl` (the module tree), `data/<key>` (raw
little-endian storages) and `code/` (the program, whose classes list their parameters and buffers). An unpickler that
only supports tensors and inert objects, together with those lists, is enough to read the state dict.
"""

import ast
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}

CLASS_LISTS = r"^class {}\(Module\):\n\s+__parameters__ = (\[.*\])\n\s+__buffers__ = (\[.*\])\n"


class _Module:
    """Inert replacement of an archived class, which only stores attributes.

    `names` lists its parameters and buffers; None if the archive has no list, which means all tensors.
    """

    names: set[str] | None = None


def _as_list(values: list[Any]) -> list[Any]:
    return values


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    # as_strided checks the bounds of the storage; the clone makes parameters independent of shared memory
    return torch.as_strided(storage, size, stride, offset).clone()


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler of tensors and `_Module`s; any other global raises an error, so that a pickle cannot call anything."""

    def __init__(self, archive: zipfile.ZipFile, root: str):
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
            return _as_list
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


def archive_root(path: Path) -> str | None:
    """Return the top folder of a TorchScript archive, or None for other files."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    roots = [name.split("/")[0] for name in names if name.endswith("/constants.pkl") and name.count("/") == 1]
    return roots[0] if roots and f"{roots[0]}/data.pkl" in names else None


def read_torchscript(path: Path, root: str) -> dict[str, Tensor]:
    """Return the parameters and buffers in a TorchScript archive with the top folder `root`, in the stored dtypes."""
    with zipfile.ZipFile(path) as archive:
        module = _TensorUnpickler(archive, root).load()
    tensors: dict[str, Tensor] = {}
    _collect(module, "", tensors)
    return tensors


def _collect(module: _Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and (module.names is None or name in module.names):
            tensors[prefix + name] = value
        elif isinstance(value, _Module):
            _collect(value, f"{prefix}{name}.", tensors)
