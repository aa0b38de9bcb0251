"""Reading of checkpoints from untrusted sources: contents and class names are checked before anything is built.

A checkpoint names the classes of its method and encoder, and building them imports their modules. Only this package's
classes are trusted by default; the user must name others explicitly.
"""

import importlib
import inspect
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import torch

from tvr_lightning import __version__
from tvr_lightning.errors import UserError
from tvr_lightning.files import delayed_interrupt, replace_whole
from tvr_lightning.option_types import hints_of

PACKAGE = __name__.partition(".")[0]
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
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
    """Raise a CheckpointError if `target` is one of the files that its content is read from, under any name or link."""
    for source in sources:
        if source is not None and source.exists() and target.exists() and target.samefile(source):
            raise CheckpointError(f"{target} is the file {source}, which is read. Choose another output file.")


def trusted_sections(path: Path, saved: Mapping[str, Any], trusted: Sequence[str] = ()) -> dict[str, Any]:
    """Return the recorded options of method and data as sections of a recipe, checked by `check_trusted`.

    The class of a section is None if it is not recorded.
    """
    found: dict[str, Any] = {}
    for section, entry in (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters")):
        found[section] = recorded = saved.get(entry) or {}
        if isinstance(recorded, dict):
            options = {name: value for name, value in recorded.items() if name not in ("_class_path", "_instantiator")}
            plain = json.loads(json.dumps(options))  # converts tuples to lists
            found[section] = {"class_path": recorded.get("_class_path"), "init_args": plain}
    check_trusted(path, found, trusted, (saved.get(RECORD) or {}).get("version"))
    return found


def check_trusted(path: Path, sections: Mapping[str, Any], trusted: Sequence[str] = (), version: object = None) -> None:
    """Refuse options of a file that would run code of neither this package nor `trusted` modules and repositories.

    All options that an untrusted user may have written pass here before anything is imported or built. Text in place of
    an object is refused, since the parser would import what it names. `version` of this package wrote the file.
    """
    for name in named_code(sections):
        if name not in trusted and ("/" in name or not _is_in(name, PACKAGE, *trusted)):
            raise CheckpointError(
                f"{path} would run the code of {name}, which is not part of {PACKAGE}. If you trust that code, pass "
                f"--trust {name} (in Python, trust=[{name!r}])."
            )
    for section, content in sections.items():
        if not isinstance(content, dict):
            raise CheckpointError(f"{path}: {section} is a {type(content).__name__}; expected named options")
        for name, kind, kinds, value in options_of_class(path, section, content) if content.get("class_path") else ():
            if not kinds:
                raise CheckpointError(
                    f"{path}: {kind.__name__} has no option {name.rpartition('.')[2]} in tvr-lightning {__version__}, "
                    f"and the file was written by {version or 'a version that it does not record'}. Use that version, "
                    "or train again."
                )
            if isinstance(value, str) and not all(_takes_text(each, value) for each in kinds):
                raise CheckpointError(f"{path}: {name} is the text {value[:80]!r}; expected class_path and init_args")


def named_code(value: Any) -> Iterator[str]:
    """Yield the modules of all classes and functions in options, and the repositories (with a `/`) that they trust."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("class_path", "_class_path", "function", "wrapper"):
                yield from filter(None, [str(item).rpartition(".")[0]])
            else:
                yield from named_code(item)
        if value.get("trust_remote_code"):
            repository = str(value.get("weights", value.get("model")))
            yield repository if "/" in repository else f"./{repository}"
    elif isinstance(value, list | tuple):
        for item in value:
            yield from named_code(item)


def find_class(path: Path, class_path: str) -> type:
    """Return a class that a file names. Call `check_trusted` first, since this imports the module.

    Args:
        path: Path of the file, for the message.
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
        if inspect.isclass(found) and (_is_in(found.__module__, PACKAGE) or not _is_in(place, PACKAGE)):
            return found
    raise CheckpointError(f"{path} names {class_path}, which cannot be found: {reason}")


def options_of_class(path: Path, name: str, section: Mapping[str, Any]) -> Iterator[tuple[str, type, list[Any], Any]]:
    """Yield dotted name, class, types, and value of each option in a section and of the classes in it.

    The types are empty for an option that does not exist, as far as this is known. Lists yield their items.
    """
    kind = find_class(path, str(section["class_path"]))
    yield from _options_of(path, name, kind, {key: item for key, item in section.items() if key not in CLASS_KEYS})
    for part in ("init_args", "dict_kwargs"):
        arguments = section.get(part)
        if isinstance(arguments, dict):
            yield from _options_of(path, f"{name}.{part}", kind, arguments)
        elif arguments is not None:
            yield f"{name}.{part}", kind, [], arguments


def _options_of(
    path: Path, name: str, kind: type, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, type, list[Any], Any]]:
    hints = hints_of(kind)
    for option, value in arguments.items():
        missing = "." in option or (option not in hints and _is_in(kind.__module__, PACKAGE))
        kinds = [] if missing else list(_kinds(hints.get(option, Any)))
        for item in _items(value):
            yield f"{name}.{option}", kind, kinds, item
            if isinstance(item, dict) and "class_path" in item:
                yield from options_of_class(path, f"{name}.{option}", item)
            elif isinstance(item, dict):
                for each in filter(inspect.isclass, kinds):
                    yield from _options_of(path, f"{name}.{option}", each, item)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _items(item)
    else:
        yield value


def _is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _takes_text(kind: Any, text: str) -> bool:
    """Return whether a text is a valid value of a type without importing anything."""
    if kind in (Any, object, list, tuple, dict):
        return ":" not in text  # jsonargparse would parse it as YAML, whose mappings may name a class
    return kind in (str, Path, int, float, bool, type(None), ...) or get_origin(kind) is Literal


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
