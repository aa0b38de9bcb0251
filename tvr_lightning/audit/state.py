"""Complete state of a method, to detect changes: parameters, buffers, attributes, and global variables of its files."""

import copy
import dataclasses
import sys
from collections import deque
from collections.abc import Iterator
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tvr_lightning.data.ground_truth import GroundTruth
from tvr_lightning.data.records import Split
from tvr_lightning.evaluation.loop import Collection
from tvr_lightning.evaluation.restricted_trainer import RestrictedTrainer

# Packages whose objects are not inspected (caches, counters), except modules, dataclasses, and containers.
LIBRARIES = {"torch", "torchvision", "lightning", "tvr_lightning", "open_clip", "transformers", "whisper"}
# Types that an attribute of a method must not have, since they reveal the pairs of the test split.
DATA = (LightningDataModule, GroundTruth, Split, Dataset, DataLoader)
# Attributes whose items are inspected one by one, or that Lightning changes.
UNINSPECTED = ("_parameters", "_buffers", "_modules", "_trainer", "_current_fx_name", "_metric_attributes")
# First elements of the tuples that replace uninspected values.
OPAQUE = ("object", "data", "run", "again")


class State:
    """State of a method at the time of creation, for comparison with a later state and for restoring it.

    The link to Lightning's trainer is excluded. Parameters and buffers are copied to main memory.

    Args:
        method: Method to inspect.

    Attributes:
        data: Names of attributes that contain the DataModule or another object with the pairs of the split.
    """

    def __init__(self, method: nn.Module) -> None:
        self.method = method
        self.data: list[str] = []
        self._frozen: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        for name, _, _, value in self._values():
            self._frozen[name] = self._freeze(value, name, {})
            if isinstance(value, Tensor):
                self._kept[name] = self._frozen[name]
            elif _plain(self._frozen[name]):
                self._kept[name] = copy.deepcopy(value)

    def changes(self) -> list[str]:
        """Return the name of every parameter, buffer, and attribute that has changed, is new, or was removed."""
        found = {name: value for name, _, _, value in self._values()}
        changed = [name for name in self._frozen if name not in found]
        for name, value in found.items():
            # Tensors are compared without a copy: copying an encoder each time takes longer than the rest of the audit.
            now = _local(value).detach().cpu() if isinstance(value, Tensor) else self._freeze(value, name, {})
            if name not in self._frozen or not _same(self._frozen[name], now):
                changed.append(name)
        return changed

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the changed values that could be copied."""
        changed = set(self.changes())
        for name, owner, attribute, value in [found for found in self._values() if found[0] in changed]:
            kept = self._kept.get(name)
            if name not in self._frozen:
                delattr(owner, attribute)
            elif isinstance(value, Tensor) and isinstance(kept, Tensor):
                if (_local(value).shape, value.dtype) == (kept.shape, kept.dtype):
                    _local(value).copy_(kept)
                else:
                    setattr(owner, attribute, kept.to(value.device))
            elif name in self._kept:
                setattr(owner, attribute, copy.deepcopy(kept))

    def _values(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield name, owner, attribute, and value of all state of the modules, their own classes, and their files."""
        classes: dict[type, None] = {}
        for prefix, module in self.method.named_modules():
            if prefix.split(".")[0] == "metrics":  # they collect ranks
                continue
            classes.update(dict.fromkeys(cls for cls in type(module).__mro__ if not _of_library(cls)))
            plain = {name: value for name, value in vars(module).items() if name not in UNINSPECTED}
            for attribute, value in {**plain, **module._parameters, **module._buffers}.items():
                yield f"{prefix}.{attribute}".removeprefix("."), module, attribute, value
        owners: dict[str, Any] = {cls.__name__: cls for cls in classes}
        files = dict.fromkeys(cls.__module__ for cls in classes if cls.__module__.partition(".")[0] not in LIBRARIES)
        owners |= {name: sys.modules[name] for name in files if name in sys.modules}
        for prefix, owner in owners.items():
            for attribute, value in list(vars(owner).items()):
                if not attribute.startswith("__") and isinstance(value, (Tensor, int, float, list, dict, set, deque)):
                    yield f"{prefix}.{attribute}", owner, attribute, value

    def _freeze(self, value: Any, name: str, seen: dict[int, int]) -> Any:
        """Convert a value to a form that later changes of the value do not affect."""
        if isinstance(value, Tensor):
            return _local(value).detach().to("cpu", copy=True)
        if isinstance(value, np.ndarray):
            return (str(value.dtype), value.shape, value.tobytes())
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Enum, PurePath)):
            return (type(value).__name__, repr(value))
        if isinstance(value, torch.Generator):
            return value.get_state()
        if isinstance(value, DATA):
            if name not in self.data:
                self.data.append(name)
            return ("data",)
        if isinstance(value, (Trainer, RestrictedTrainer, LightningModule, Collection)):
            return ("run",)  # the evaluation changes them; methods within this one are inspected separately
        if id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
        if isinstance(value, (list, tuple, deque)):
            return [type(value).__name__, *(self._freeze(item, name, seen) for item in value)]
        if isinstance(value, (set, frozenset)):
            return ["set", *sorted(repr(item) for item in value)]
        if isinstance(value, dict):
            pairs = [(self._freeze(key, name, seen), self._freeze(item, name, seen)) for key, item in value.items()]
            return ["dict", *(part for pair in pairs for part in pair)]
        opaque = callable(value) or _of_library(type(value))
        if (
            isinstance(value, type)
            or not hasattr(value, "__dict__")
            or (opaque and not dataclasses.is_dataclass(value))
        ):
            return ("object", id(value))
        return [type(value).__name__, self._freeze(vars(value), name, seen)]


def _of_library(cls: type) -> bool:
    root = cls.__module__.partition(".")[0]
    return root in ("builtins", "torch") or (root in LIBRARIES and not issubclass(cls, nn.Module))


def _local(tensor: Tensor) -> Tensor:
    """Return this device's part of a sharded tensor, or any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _plain(frozen: Any) -> bool:
    """Return True if a frozen value contains only plain values. Copies of other values can share state or fail."""
    if isinstance(frozen, list):
        return all(map(_plain, frozen))
    return not (isinstance(frozen, tuple) and frozen[0] in OPAQUE)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        # Almost always equal, which takes one pass; only otherwise are passes for NaN needed.
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
