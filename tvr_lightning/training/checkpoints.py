"""Reading of checkpoints from untrusted sources: contents and class names are checked before anything is built.

A checkpoint names the classes of its method and encoder, and building them imports their modules. Only this package's
classes are trusted by default; the user must name others explicitly.
"""

import dataclasses
import importlib
import inspect
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import torch

from tvr_lightning.errors import UserError
from tvr_lightning.files import delayed_interrupt, replace_whole
from tvr_lightning.option_types import hints_of

PACKAGE = __name__.partition(".")[0]
# Entries of a checkpoint.
RECORD = "weights"  # the run's record of its weights; checkpoints of earlier versions have none
FROZEN = "frozen_weights"  # the digest of the other weights, if it contains only what was trained
CONVERTED = "authors_checkpoint"  # if `tvr convert` created it from the authors' own


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of another method or size; the message has what was found and what fits."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint: memory-mapped tensors and plain values. No code in it is executed."""
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; name a checkpoint file. Shards in a folder cannot be read without running code from "
            "them. Save checkpoints in one file (save_distributed_checkpoint: false)."
        )
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint; looked for it at {path.absolute()}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read as a checkpoint ({error.strerror or error})") from error
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as a checkpoint. It is damaged, or contains more than tensors and plain values. "
            "Copy or download it again."
        ) from error
    if not isinstance(saved, dict) or not isinstance(saved.get("hyper_parameters"), dict):
        raise CheckpointError(
            f"{path}: not a checkpoint of tvr fit or tvr convert, since it has no "
            "hyper_parameters. Convert an authors' checkpoint with tvr convert."
        )
    state = saved.get("state_dict", {})
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: its state_dict contains more than named tensors. Copy or download it again.")
    return saved


def write_checkpoint(content: dict[str, Any], target: Path, fix: str = "choose another folder") -> None:
    """Write tensors and plain values atomically. The `fix` is an alternative to a larger disk."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # torch's writer would turn an interruption into a RuntimeError.
        with delayed_interrupt(), replace_whole(target) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        previous = "The previous file is intact" if target.exists() else "There is no previous file"
        raise UserError(
            f"{target} could not be written ({str(error).splitlines()[0]}). {previous}. Free disk space, raise the "
            f"file size limit (ulimit -f), or {fix}."
        ) from error


def check_target(target: Path, *sources: Path | None) -> None:
    """Raise a UserError if `target` is one of the files that its content is read from, under any name or link."""
    for source in sources:
        if source is not None and source.exists() and target.exists() and target.samefile(source):
            raise UserError(f"{target} is the file {source}, which is read. Choose another output file.")


def check_classes(path: Path, saved: dict[str, Any], trusted: Sequence[str] = ()) -> None:
    """Refuse a checkpoint that names a class of a module that is not `trusted`, without importing any module."""
    for section in ("hyper_parameters", "datamodule_hyper_parameters"):
        for class_path in named_classes(saved.get(section)):
            module = class_path.rpartition(".")[0]
            if module and not any(module == name or module.startswith(f"{name}.") for name in (PACKAGE, *trusted)):
                raise CheckpointError(
                    f"{path} names {class_path}, which is not a class of {PACKAGE}. Building it would run the code of "
                    f"{module}. If you trust that code, pass --trust {module}"
                )


def named_classes(value: Any) -> Iterator[str]:
    """Yield every class path in hyperparameters, including those of nested objects."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("class_path", "_class_path"):
                yield str(item)
            else:
                yield from named_classes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from named_classes(item)


def find_class(path: Path, class_path: str) -> type:
    """Return a class that a checkpoint names. Call `check_classes` first, since this imports the module.

    Args:
        path: Path of the checkpoint, for the message.
        class_path: Name as `module.Class`, or only the name of a method, encoder or normalizer of this package.
    """
    module, _, name = class_path.rpartition(".")
    own = [f"{PACKAGE}.methods", f"{PACKAGE}.encoders", f"{PACKAGE}.evaluation.normalization"]
    reason = "there is no such class"
    for place in [module] if module else own:
        try:
            found = getattr(importlib.import_module(place), name, None)
        except ImportError as error:
            reason = f"{error}; Python looks for modules in PYTHONPATH"
            continue
        if inspect.isclass(found):
            return found
    raise CheckpointError(f"{path} names {class_path}, which cannot be found: {reason}")


def check_arguments(path: Path, kind: type, arguments: dict[str, Any]) -> None:
    """Refuse text instead of an object in arguments of a class, since building it would import what the text names.

    `tvr fit` writes objects as class_path and init_args, which `check_classes` has checked.
    """
    hints = hints_of(kind)
    for name, value in arguments.items():
        if name in hints:
            _check_argument(path, f"{kind.__name__}.{name}", list(_kinds(hints[name])), value)


def _check_argument(path: Path, name: str, kinds: list[Any], value: Any) -> None:
    if isinstance(value, str):
        if not all(_takes_text(kind, value) for kind in kinds):
            raise CheckpointError(f"{path}: {name} is the text {value[:80]!r}; expected class_path and init_args")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_argument(path, name, kinds, item)
    elif isinstance(value, dict) and "class_path" in value:
        built = find_class(path, str(value["class_path"]))
        for section in ("init_args", "dict_kwargs"):
            if isinstance(value.get(section), dict):
                check_arguments(path, built, value[section])
    elif isinstance(value, dict):
        for kind in kinds:
            if dataclasses.is_dataclass(kind):
                check_arguments(path, kind, value)  # type: ignore[arg-type]


def _takes_text(kind: Any, text: str) -> bool:
    """Return whether a text is a valid value of a type without importing anything."""
    if kind in (Any, object):
        return ":" not in text  # jsonargparse would parse it as YAML, whose mappings may name a class
    plain = (str, Path, int, float, bool, type(None), list, tuple, dict, ...)
    return kind in plain or get_origin(kind) is Literal


def _kinds(hint: Any) -> Iterator[Any]:
    """Yield the single types in an annotation; functions and literals stay as they are."""
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        yield from _kinds(inner[0])
    elif not inner or get_origin(hint) in (Literal, Callable):
        yield hint
    else:
        for each in inner:
            yield from _kinds(each)
