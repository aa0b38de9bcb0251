"""Options as plain values for checkpoints, and their comparison."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from tvr_lightning.option_types import ConfigVariant


def plain_options(value: Any) -> Any:
    """Return options as dicts, lists, text and numbers, so that checkpoints contain no objects.

    Modules and functions are removed from dicts, because they have no text form. An object of another class becomes its
    class_path with init_args, as in recipes: those arguments of its constructor that it stores under the same names.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, ConfigVariant | type):
        return plain_options({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        code = (nn.Module, type, functools.partial)
        texts = {key: item for key, item in value.items() if not (isinstance(item, code) or inspect.isroutine(item))}
        return {key: plain_options(item) for key, item in texts.items()}
    if isinstance(value, list | tuple):
        return [plain_options(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    kind = type(value)
    arguments = {name: getattr(value, name) for name in inspect.signature(kind).parameters if hasattr(value, name)}
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": plain_options(arguments)}


def flat_options(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of an option or section; classes without modules, which recipes may omit."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat_options(f"{name}.{key}", item)
    elif name.endswith(".init_args") and value == {}:
        return  # a class without arguments has two equivalent forms
    elif name.endswith(".class_path"):
        yield name, str(value).rpartition(".")[2]
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def changed_options(name: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of every option in a section that differs; `nothing` if it is missing."""
    before = dict(flat_options(name, then))
    after = dict(flat_options(name, now))
    for option in before | after:
        values = before.get(option, "nothing"), after.get(option, "nothing")
        if values[0] != values[1]:
            yield option, *values


def other_options(trained: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return the differences between the options of a checkpoint and a model, as `option value (here: value)`.

    Options that only one of them has, such as an encoder built in Python, are ignored.
    """
    common = [name for name in trained if name in here and not name.startswith("_")]
    return [
        f"{option} {value_text(then)} (here: {value_text(now)})"
        for name in common
        for option, then, now in changed_options(name, trained[name], here[name])
    ]


def value_text(value: Any) -> str:
    """Return a value as in a recipe."""
    return "null" if value is None else str(value)
