"""Reading checkpoints that may come from anybody: what they hold and which classes they name, before anything is built.

A checkpoint names the classes of its method and encoder, and building them imports their modules. Only this package's
classes are taken at its word; others must be named by the user as well.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tvr_lightning.errors import UserError

PACKAGE = __name__.partition(".")[0]


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is absent, damaged, of another method or of other sizes; says what was found and what fits."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds: tensors, mapped from the file, and plain values; nothing in it is executed.

    Raises:
        CheckpointError: there is no such file, or it is not a checkpoint of `tvr fit` or `tvr convert`.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint; looked for it at {path.absolute()}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as a checkpoint ({str(error).splitlines()[0]})") from error
    if not isinstance(saved, dict) or not isinstance(saved.get("hyper_parameters"), dict):
        raise CheckpointError(f"{path}: not a checkpoint that tvr fit or tvr convert wrote; it has no hyper_parameters")
    return saved


def check_classes(path: Path, saved: dict[str, Any], trusted: Sequence[str] = ()) -> None:
    """Refuse a checkpoint that names a class of a module that nobody vouched for; no module is imported.

    Args:
        path: of the checkpoint, for the message.
        saved: what `read_checkpoint` returned.
        trusted: modules or packages that the user named; their classes may be built besides this package's.

    Raises:
        CheckpointError: another module's class; says which.
    """
    for section in ("hyper_parameters", "datamodule_hyper_parameters"):
        for class_path in named_classes(saved.get(section)):
            module = class_path.rpartition(".")[0]
            if module and not any(module == name or module.startswith(f"{name}.") for name in (PACKAGE, *trusted)):
                raise CheckpointError(
                    f"{path}: names {class_path}, which is not a class of {PACKAGE}; building it would run the code of "
                    f"{module}. If you trust it, say so with --trust {module}"
                )


def named_classes(value: Any) -> Iterator[str]:
    """Yield every class path in hyperparameters: of the object itself and of all objects nested in them."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("class_path", "_class_path"):
                yield str(item)
            else:
                yield from named_classes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from named_classes(item)
